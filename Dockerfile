# GPU:
#   docker build -t native-te .
#   docker run --rm -it --gpus all --ipc=host -v "$PWD/outputs:/workspace/outputs" native-te python train_fsdp2.py
# CPU:
#   docker build -t native-te-cpu --build-arg BASE_IMAGE=ubuntu:24.04 --build-arg REQUIREMENTS=requirements.txt .
#   docker run --rm -it --ipc=host -v "$PWD/outputs:/workspace/outputs" native-te-cpu python train_fsdp2.py
# The GPU image compiles TransformerEngine's PyTorch extension, so its base holds nvcc and cuDNN's headers.
# --ipc=host: loader workers hand over batches through shared memory, of which Docker gives 64 MiB by default.
ARG BASE_IMAGE=nvidia/cuda:13.0.1-cudnn-devel-ubuntu24.04
FROM ${BASE_IMAGE}

RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        build-essential git python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

ENV VIRTUAL_ENV=/opt/venv
ENV PATH=/opt/venv/bin:$PATH
RUN python3 -m venv /opt/venv

WORKDIR /workspace
COPY requirements.txt requirements-gpu.txt ./
# torch comes first: TransformerEngine's build imports it.
RUN pip install --no-cache-dir setuptools wheel ninja -r requirements.txt
ARG REQUIREMENTS=requirements-gpu.txt
RUN pip install --no-cache-dir --no-build-isolation -r ${REQUIREMENTS}

COPY . .
