# NVIDIA's PyTorch with what else this project needs. The code is not in the image but mounted, so that editing it
# rebuilds nothing:
#
#   docker build -t llama3_native_te .
#   docker run -it --gpus all --network host --ipc=host --rm -v ${PWD}:/workspace/bionemo llama3_native_te /bin/bash
#
# --ipc=host: loader workers hand over batches through shared memory, of which Docker gives 64 MiB by default.
ARG BASE_IMAGE=nvcr.io/nvidia/pytorch:26.10-py3
FROM ${BASE_IMAGE}
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
WORKDIR /workspace/bionemo

# NVIDIA's builds of these stay: pip has to fit everything else to exactly these versions, or to fail.
RUN pip list --format=freeze | grep -iE '^(torch|(pytorch[-_])?triton|flash[-_]attn|transformer[-_]engine[^=]*)==' \
        > /opt/constraints.txt \
    && python -c "from importlib.metadata import version; from packaging.version import Version; \
found = {name: Version(version(name)).release for name in ('torch', 'transformer_engine')}; \
assert found['torch'] >= (2, 11) and found['transformer_engine'] >= (2, 20), f'take a newer BASE_IMAGE: {found}'"
ENV PIP_CONSTRAINT=/opt/constraints.txt

# NVIDIA's torch is a pre-release, which torch>=2.11 would not accept, so these lines go before pip sees them.
COPY requirements.txt requirements-gpu.txt /opt/
RUN sed -E '/^(-r |torch[<>=]|transformer-engine)/d' /opt/requirements.txt /opt/requirements-gpu.txt > /opt/others.txt \
    && pip install --no-cache-dir -r /opt/others.txt
