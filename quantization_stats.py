"""Statistics of quantised tensors, layer by layer: what a recipe loses.

``quant_stats_config.quant_stats_file`` is a config of nvdlfw-inspect (quantization_stats_config.py;
quantization_stats_rules.py checks it). On TransformerEngine that library has TE's kernels compute; on the reference
backend te_reference computes the same statistics, so that a recipe can be judged before there is hardware for it.
Either way the lines go to
``<quant_log_dir>/nvdlfw_inspect_statistics_logs/nvdlfw_inspect_globalrank-<rank>.log`` in nvdlfw-inspect's form, with 8
significant digits where its own logger would print 4 decimals (an mse of 1e-6 as 0.0000):

    2026-01-31 12:00:00,000 - INFO - model.model.layers.1.layernorm_mlp.fc1_activation_underflows%  iteration=000010 ...

Iterations are nvdlfw-inspect's: optimiser steps completed before. A statistic covers all micro-batches and ranks. A
new run keeps an earlier one's file as ``nvdlfw_inspect_globalrank-<rank>.1.log``, ``.2.log``, ... Where a line cannot
be written (a full disk), the statistics end and the run goes on. benchmarks/plot_quant_stats.py plots the file.
"""

import importlib.util
import logging
import re
from contextlib import suppress
from dataclasses import fields
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TextIO

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedConfig

import te_backend
from commits import write_atomically
from config import TrainConfig
from distributed import own_rank, together, unwrap
from errors import ConfigError
from loggers import move_aside
from paths import project_path
from precision import PrecisionPlan
from quantization_stats_config import Request, inspect_name, linear_layers, requests_for, without_quantized_weights
from quantization_stats_rules import load_stats_config
from quantized_parameters import low_precision_layers
from te_reference.emulation import Operands, quantize
from te_reference.quant_stats import QuantStats, measure
from te_reference.recipe import RECIPES


logger = logging.getLogger(__name__)

OWN_FOLDER = "quant_stats"
"""In the run's folder."""
LOG_FOLDER = "nvdlfw_inspect_statistics_logs"
LINE = re.compile(r"INFO - (?P<name>\S+)\s+iteration=(?P<iteration>\d+)\s+value=(?P<value>\S+)")


class Statistics(Protocol):
    """What a train script does with statistics, wherever they are computed."""

    def attach(self, model: nn.Module, start_step: int) -> None:
        """Once the model is whole and a checkpoint is loaded: ``start_step`` optimiser steps are done."""

    def step(self) -> None:
        """After every optimiser step. Collective over all ranks."""

    def close(self) -> None:
        """At the end of the run."""


def start_statistics(
    config: TrainConfig, plan: PrecisionPlan, model_config: PreTrainedConfig, run_dir: Path
) -> Statistics:
    """Reads ``quant_stats_config``; call it before the model is built (TransformerEngine asks for that). Collective.

    Args:
        run_dir: of ``perf_logger.run_folder``, rank 0's of which counts.

    Raises:
        ConfigError: a file that breaks a rule or that the backend cannot honour, or none of whose layers uses its
            format; a folder that cannot be written.
        ModuleNotFoundError: TransformerEngine without nvdlfw-inspect.
    """
    options = config.quant_stats_config
    if not options.enabled:
        return NoStatistics(run_dir / OWN_FOLDER)
    path = project_path(options.quant_stats_file)
    layers = linear_layers(plan, has_experts=hasattr(model_config, "num_local_experts"))
    on_reference = te_backend.is_reference(plan.te)
    stats_config = load_stats_config(Path(path), layers, None if on_reference else torch.cuda.get_device_capability())
    if plan.quantized_init:
        stats_config = without_quantized_weights(stats_config, path)
    if options.quant_log_dir is not None:
        writer = StatisticsWriter(Path(options.quant_log_dir), shared=True)
    else:
        folders = together(lambda: run_dir / OWN_FOLDER, ValueError, "the folders of the ranks are not known")
        writer = StatisticsWriter(folders[0], shared=False)
    if on_reference:
        return ReferenceStatistics(stats_config, writer)
    return InspectStatistics(stats_config, writer)


class NoStatistics:
    """``quant_stats_config.enabled=false``. A new run moves an earlier run's statistics aside all the same: what
    resumes this run must not continue them."""

    def __init__(self, folder: Path):
        self._folder = folder

    def attach(self, model: nn.Module, start_step: int) -> None:
        if start_step == 0 and own_rank() == 0 and self._folder.is_dir():
            move_aside(self._folder)

    def step(self) -> None: ...

    def close(self) -> None: ...


class StatisticsWriter:
    """Writes this rank's file. A line that cannot be written is the last: the statistics end, and the run goes on.

    A resumed run appends to the file, and drops what was written about the steps that it repeats. A new run moves an
    earlier run's file aside.

    Args:
        folder: made where it is missing.
        shared: other runs may write there, too: a resumed run that drops lines keeps the file that held them.

    Raises:
        ConfigError: on every rank, if one cannot write there.
    """

    def __init__(self, folder: Path, shared: bool):
        self.folder, self._shared = folder, shared
        self.path = folder / LOG_FOLDER / f"nvdlfw_inspect_globalrank-{own_rank()}.log"
        self._file: TextIO | None = None
        together(self._check, ConfigError, self._cannot_write())

    def _check(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.open("a").close()

    def _cannot_write(self) -> str:
        return (
            f"statistics cannot be written to {self.path.parent}: set quant_stats_config.quant_log_dir to a folder "
            "that every rank can write to"
        )

    def open(self, start_iteration: int) -> None:
        """Opens the file before iteration ``start_iteration``; 0: a new run. Collective.

        Raises:
            ConfigError: on every rank, if one cannot write.
        """
        together(partial(self._open, start_iteration), ConfigError, self._cannot_write())
        logger.info("statistics: in %s", self.path)

    def _open(self, start_iteration: int) -> None:
        if start_iteration:
            self._drop_from(start_iteration)
        elif self.path.stat().st_size:
            move_aside(self.path)
        self._file = self.path.open("a", buffering=1)

    def _drop_from(self, start_iteration: int) -> None:
        """Keeps the lines of earlier iterations; the file is replaced in one move."""
        lines = self.path.read_text(errors="replace").splitlines(keepends=True)
        found = [(line, LINE.search(line)) for line in lines if line.endswith("\n")]  # a kill may cut the last
        kept = [line for line, match in found if match and int(match["iteration"]) < start_iteration]
        dropped = len(lines) - len(kept)
        if dropped and self._shared:
            move_aside(self.path)
        if dropped:
            write_atomically(self.path, "".join(kept))
            logger.info("Dropped %d lines from iteration %d on from %s.", dropped, start_iteration, self.path)

    def log_scalar(self, name: str, value: float, iteration: int) -> None:
        """One line."""
        if self._file is None:
            return
        now = datetime.now().isoformat(" ", "milliseconds").replace(".", ",")
        try:
            self._file.write(
                f"{now} - INFO - {name} \t\t\t\t iteration={iteration:06d} \t\t\t\t value={float(value):.8g}\n"
            )
        except OSError as error:
            self._fail(error)

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            try:
                self._file.close()
            except OSError as error:
                self._fail(error)
            self._file = None

    def _fail(self, error: OSError) -> None:
        logger.error("%s cannot be written, and gets no more statistics: %s", self.path, error)
        file, self._file = self._file, None
        with suppress(OSError):  # what it still holds
            file.close()


class InspectStatistics:
    """TransformerEngine's, through nvdlfw-inspect."""

    def __init__(self, stats_config: dict[str, Any], writer: StatisticsWriter):
        if importlib.util.find_spec("nvdlfw_inspect") is None:
            raise ModuleNotFoundError(
                "quant_stats_config.enabled=true needs nvdlfw-inspect with TransformerEngine: pip install -r "
                "requirements-gpu.txt, or set te_backend=reference, which computes the statistics itself."
            )
        import nvdlfw_inspect.api as inspect_api
        from nvdlfw_inspect.logging import BaseLogger

        import quantization_stats_te  # imports TransformerEngine

        self._log = quantization_stats_te.install()

        class Logger(BaseLogger):
            def log_scalar(self, name: str, value: float, iteration: int, **kwargs: Any) -> None:
                writer.log_scalar(name, value, iteration)

        features = Path(importlib.util.find_spec("transformer_engine").origin).parent / "debug" / "features"
        inspect_api.initialize(
            config_file=stats_config,
            feature_dirs=[str(features)],
            statistics_logger=Logger(),
            log_dir=str(writer.folder),
        )
        self._api, self._writer = inspect_api, writer

    def attach(self, model: nn.Module, start_step: int) -> None:
        _say_what_is_left_out(model)
        self._api.infer_and_assign_layer_names(unwrap(model))
        self._api.initialize_training_step(start_step)
        self._writer.open(start_step)

    def step(self) -> None:
        self._api.step()

    def close(self) -> None:
        self._log.write()
        self._api.end_debug()
        self._writer.close()


class Key(NamedTuple):
    """What one set of statistics is of."""

    layer: str
    tensor: str
    recipe: str
    columnwise: bool


class ReferenceStatistics:
    """te_reference's: every linear layer shows each of its quantisations to :meth:`_observe`."""

    def __init__(self, stats_config: dict[str, Any], writer: StatisticsWriter):
        self._config, self._writer = stats_config, writer
        self._requests: dict[tuple[str, str], list[Request]] = {}  # by layer and tensor
        self._own_recipe: dict[str, str] = {}  # by layer
        self._collected: dict[Key, QuantStats] = {}  # of this iteration, so far
        self._iteration = 0

    def attach(self, model: nn.Module, start_step: int) -> None:
        _say_what_is_left_out(model)
        for layer_name, layer, recipe in low_precision_layers(unwrap(model)):
            for module_name, module in layer.named_modules():
                if not hasattr(module, "observer"):
                    continue
                full_name = inspect_name(layer_name, module_name)
                module.observer = partial(self._observe, full_name)
                for part in module.linear_names:
                    name = f"{full_name}.{part}" if part else full_name
                    self._own_recipe[name] = type(recipe).__name__
                    for request in requests_for(self._config, name):
                        self._requests.setdefault((name, request.tensor), []).append(request)
        self._iteration = start_step
        self._writer.open(start_step)

    def _observe(
        self, module_name: str, part: str, tensor: str, matrix: torch.Tensor, operands: Operands, recipe: Any
    ) -> None:
        layer, own = f"{module_name}.{part}" if part else module_name, type(recipe).__name__
        due = [request for request in self._requests.get((layer, tensor), ()) if request.due(self._iteration)]
        for recipe_name, columnwise in {(stat.recipe or own, stat.columnwise) for r in due for stat in r.stats}:
            key = Key(layer, tensor, recipe_name, columnwise)
            if tensor == "weight" and key in self._collected:
                continue  # the same in every micro-batch
            if recipe_name == own:
                stats = measure(matrix, operands, recipe, columnwise)
            else:
                what_if = RECIPES[recipe_name]()
                stats = measure(matrix, quantize(matrix, what_if, tensor), what_if, columnwise)
            self._collected[key] = self._collected[key].merge(stats) if key in self._collected else stats

    def step(self) -> None:
        merged, self._collected = merge_over_ranks(self._collected), {}
        if own_rank() == 0:
            for (layer, tensor), requests in self._requests.items():
                for request in requests:
                    if request.due(self._iteration):
                        for stat in request.stats:
                            key = Key(layer, tensor, stat.recipe or self._own_recipe[layer], stat.columnwise)
                            name = f"{layer}_{tensor}_{stat.shown}"
                            self._writer.log_scalar(name, merged[key].values()[stat.name], self._iteration)
        self._iteration += 1

    def close(self) -> None:
        self._writer.close()


def merge_over_ranks(collected: dict[Key, QuantStats]) -> dict[Key, QuantStats]:
    """The statistics of all ranks together; every rank has the same keys. Three collectives."""
    if not collected or not dist.is_initialized() or dist.get_world_size() == 1:
        return collected
    keys = sorted(collected)
    reduced = {}
    for field in fields(QuantStats):
        values = [getattr(collected[key], field.name) for key in keys]
        present = [value for value in values if value is not None]
        operation = {"scale_inv_min": dist.ReduceOp.MIN, "scale_inv_max": dist.ReduceOp.MAX}.get(field.name)
        if field.name == "cur_amax":
            operation = dist.ReduceOp.MAX
        total = torch.stack(present) if present else None
        if total is not None:
            dist.all_reduce(total, op=operation or dist.ReduceOp.SUM)
        results = iter(total.unbind()) if total is not None else iter(())
        reduced[field.name] = [None if value is None else next(results) for value in values]
    return {
        key: QuantStats(**{name: values[index] for name, values in reduced.items()}) for index, key in enumerate(keys)
    }


def _say_what_is_left_out(model: nn.Module) -> None:
    if any(hasattr(module, "scaling_tensors") for module in model.modules()):
        logger.info("statistics: of attention's linear layers; TransformerEngine has none for the experts' operations")
