"""A module whose parameters, gradients and float buffers are views into flat vectors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from raysim.core.layout import Layout, integer_buffers
from raysim.core.method import Batch, GradFn, LayerOp, LossFn, Outputs
from raysim.training.tasks import CLASSES, Task


def state_of(module: nn.Module, layout: Layout) -> Tensor:
    """Return [num_state]: a module's parameters and buffers in the order of the layout."""
    values = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return torch.cat([layout.pack(leaf, values[leaf.name].detach()) for leaf in layout.leaves])


class BoundModel:
    """A module bound to `state` [num_state] = [params | buffers] and `grad` [num_params].

    Loading a client's starting point, taking a step and computing the update are then one vector operation each. The
    module is built once per trainer. The attribute `loss` holds the last training loss (scalar, detached).

    Args:
      head: path of the classifier layer.
      features: whether forward passes return the input of the head.
      precision: precision of forward and backward passes: "float32", or "bfloat16" (autocast). Parameters, gradients,
        losses, and the logits and features for hooks are float32 in both cases.
      task: its loss is measured on the validation set; the attribute `criterion` is the mean loss of a batch.
      backend, batch_size: see `compiled`; only the passes of local steps are compiled. backend False: no compilation.
    """

    def __init__(
        self,
        module: nn.Module,
        layout: Layout,
        *,
        head: str,
        device: str = "cpu",
        features: bool = False,
        precision: str = "float32",
        task: Task = CLASSES,
        backend: bool | str = False,
        batch_size: int = 0,
    ):
        self.module = module.to(device)
        self.layout = layout
        self.precision = precision
        self.task, self.criterion = task, task.criterion
        self.device = torch.device(device)
        self.state = torch.empty(layout.num_state, device=self.device)
        self.params = self.state[: layout.num_params]
        self.buffers = self.state[layout.num_params :]
        self.grad = torch.zeros(layout.num_params, device=self.device)
        self.loss = torch.zeros((), device=self.device)
        self.counters = integer_buffers(self.module)
        self._features: Tensor | None = None
        self._step_forward = compiled(self.module, backend, batch_size, self.device) if backend else self.module
        self._parameters: list[Tensor] = []
        self._grad_views: list[Tensor] = []
        self._bind()
        if self.device.type != "cpu":
            for layer in self.module.modules():
                if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                    align(layer)
        if features:
            self.module.get_submodule(head).register_forward_pre_hook(self._keep_features)
        self.has_batch_norm = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in self.module.modules())
        #: Whether an example's output in train mode depends on its batch: by BatchNorm, or by the draws of dropout.
        self.depends_on_batches = self.has_batch_norm or any(map(_drops, self.module.modules()))

    def _bind(self) -> None:
        values, grads = self.layout.views(self.state), self.layout.views(self.grad)
        trained = {leaf.name for leaf in self.layout.params}
        for name, parameter in self.module.named_parameters():
            parameter.requires_grad_(name in trained)
            if name in trained:
                values[name].copy_(parameter.data)
                parameter.data = values[name]
                parameter.grad = grads[name]
                self._parameters.append(parameter)
                self._grad_views.append(grads[name])
        for leaf in self.layout.buffers:
            owner = self.module.get_submodule(leaf.layer)
            name = leaf.name.rpartition(".")[2]
            values[leaf.name].copy_(owner._buffers[name])  # type: ignore[arg-type]  # a persistent buffer is never None
            owner._buffers[name] = values[leaf.name]

    def _keep_features(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._features = inputs[0]

    def load(self, state: Tensor, counters: Mapping[str, int] | None = None) -> None:
        """Set parameters and buffers from [num_state] and the integer counters (0 where none is given)."""
        self.state.copy_(state)
        for name, buffer in self.counters.items():
            buffer.fill_((counters or {}).get(name, 0))

    def counts(self) -> dict[str, int]:
        """Return the integer counters, copied from the device at once."""
        if not self.counters:
            return {}
        return dict(zip(self.counters, torch.stack([*self.counters.values()]).long().tolist(), strict=True))

    @contextmanager
    def replaced(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Run the module in the block with replaced parameters, of any shape with which the module can run."""
        parameters = {name: self.module.get_parameter(name) for name in tensors}
        kept = {name: (parameter.data, parameter.grad) for name, parameter in parameters.items()}
        try:
            for name, parameter in parameters.items():
                parameter.grad = None
                parameter.data = tensors[name].to(self.device)
            yield
        finally:
            for name, parameter in parameters.items():
                parameter.data, parameter.grad = kept[name]

    def forward(self, inputs: Tensor) -> Outputs:
        """Return the outputs at the current state, in the module's current mode."""
        return self._outputs(self.module, inputs)

    def _outputs(self, module: Callable[[Tensor], Tensor], inputs: Tensor) -> Outputs:
        if self.precision == "bfloat16":
            with torch.autocast(self.device.type, torch.bfloat16):
                logits = module(inputs).float()
            features = self._features.float() if self._features is not None else None
        else:
            logits, features = module(inputs), self._features
        self._features = None
        return Outputs(logits, features)

    def gradient_function(self, loss: LossFn) -> GradFn:
        """Return gradient(params, batch) of a loss, the gradient function before any `grads` hook.

        With `params` = `self.params`, the function returns `self.grad`, which the caller may modify until the next
        call, and the forward pass updates buffers, as in any training step. With another point, parameters and buffers
        are restored afterwards, so that BatchNorm's statistics come from the training steps only.
        """

        def gradient(params: Tensor, batch: Batch) -> Tensor:
            if params is not self.params:
                with self.at(params):
                    return gradient(self.params, batch)
            grads = self._differentiate(loss, batch)
            with torch.no_grad():
                torch._foreach_copy_(self._grad_views, grads)
            return self.grad

        return gradient

    def descend(self, loss: LossFn, batch: Batch, lr: float) -> None:
        """Take an SGD step params -= lr * gradient without writing `self.grad`; the bits are the same as with it."""
        grads = self._differentiate(loss, batch)
        with torch.no_grad():
            torch._foreach_add_(self._parameters, grads, alpha=-lr)

    def _differentiate(self, loss: LossFn, batch: Batch) -> list[Tensor]:
        """Return the gradient of each trained parameter in autograd's own tensors, without a copy into `self.grad`."""
        value = loss(self._outputs(self._step_forward, batch.inputs), batch)
        for parameter in self._parameters:
            parameter.grad = None
        torch.autograd.backward(value)
        self.loss = value.detach()
        grads = []
        for parameter, view in zip(self._parameters, self._grad_views, strict=True):
            # A parameter that the loss does not depend on has no gradient.
            grads.append(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
            parameter.grad = view
        return grads

    def gradient(self, loss: LossFn, point: Tensor, batch: Batch, *, moves_buffers: bool = False) -> Tensor:
        """Return [num_params]: gradient of a batch's loss at a point; parameters and `self.grad` are restored.

        Buffers are restored as well, unless `moves_buffers`: the forward pass then updates buffers as a training step.
        """
        with self.at(point, moves_buffers=moves_buffers), self._gradient_kept():
            return self.gradient_function(loss)(self.params, batch).clone()

    def mean_gradient(self, batches: Iterable[Batch], *, num_examples: int, train: bool, seed: int) -> Tensor:
        """Return [num_params]: gradient of the mean loss over all batches at the current state.

        FedVG, section 3 (validation gradient): accumulated over mini-batches of any size. Buffers, counters, mode and
        the random streams of training are restored.
        """
        with self.aside(self.state, train=train, seed=seed):
            self.grad.zero_()
            for batch in batches:
                logits = self.forward(batch.inputs).logits
                torch.autograd.backward(self.task.total(logits, batch.targets) / num_examples)
            return self.grad.clone()

    @torch.no_grad()
    def mean_loss(self, batches: Iterable[Batch], *, num_examples: int, train: bool, seed: int) -> float:
        """Return the mean loss over all batches at the current state; see `mean_gradient`."""
        with self.aside(self.state, train=train, seed=seed):
            total = torch.zeros((), dtype=torch.float64, device=self.device)
            for batch in batches:
                total += self.task.total(self.forward(batch.inputs).logits, batch.targets)
        return float(total) / num_examples

    @contextmanager
    def aside(self, point: Tensor, *, train: bool, seed: int) -> Iterator[None]:
        """Move the model to a point in a mode, with separate random draws (dropout); restore all after the block."""
        with self.at(point, train=train), self._gradient_kept(), streams_kept(self.device):
            seed_global_stream(seed, self.device)
            yield

    @torch.no_grad()
    def apply(self, point: Tensor, inputs: Tensor) -> Outputs:
        """Return the outputs at a point, in eval mode, without gradients; a point [num_state] includes the buffers.

        The model's tensors are not written, so a `loss` hook may call this between the forward and the backward pass.
        """
        values = {**self.layout.views(self.state), **self.layout.views(point)}
        mode = self.module.training
        self.module.eval()
        try:
            return self._outputs(lambda x: torch.func.functional_call(self.module, values, (x,)), inputs)
        finally:
            self.module.train(mode)

    @contextmanager
    def at(self, point: Tensor, *, train: bool | None = None, moves_buffers: bool = False) -> Iterator[None]:
        """Move the model to another point, and optionally another mode; restore everything after the block.

        Args:
          moves_buffers: whether buffers keep the values that they have at the end of the block.
        """
        kept, mode = self.state.clone(), self.module.training
        counters = {name: buffer.clone() for name, buffer in self.counters.items()}
        if point.data_ptr() != self.state.data_ptr():
            self.state[: point.numel()].copy_(point)
        if train is not None:
            self.module.train(train)
        try:
            yield
        finally:
            self.params.copy_(kept[: len(self.params)])
            if not moves_buffers:
                self.buffers.copy_(kept[len(self.params) :])
                for name, buffer in self.counters.items():
                    buffer.copy_(counters[name])
            self.module.train(mode)

    @contextmanager
    def _gradient_kept(self) -> Iterator[None]:
        """Restore `self.grad` and `self.loss`: a `grads` hook may compute another gradient while using `self.grad`."""
        grad, loss = self.grad.clone(), self.loss
        try:
            yield
        finally:
            self.grad.copy_(grad)
            self.loss = loss

    @contextmanager
    def overridden(self, ops: Mapping[str, LayerOp]) -> Iterator[None]:
        """Replace the operations of layers (the `forward` hook) in the block."""
        layers = {name: self.module.get_submodule(name) for name in ops}
        for name, layer in layers.items():
            layer.forward = partial(ops[name], layer)
        try:
            yield
        finally:
            for layer in layers.values():
                del layer.forward


def compiled(
    module: nn.Module, backend: bool | str, batch_size: int, device: torch.device
) -> Callable[[Tensor], Tensor]:
    """Return forward(inputs): a module compiled for batches of one size; batches of other sizes run uncompiled.

    A graph for several sizes, and the bits of its results, would depend on earlier batch sizes in the process.

    Args:
      backend: backend of `torch.compile`; True: inductor, on CUDA with CUDA graphs.
      batch_size: B, number of examples of a compiled batch.
    Returns:
      forward: (B, ...) inputs of the module -> its outputs, (B, num_outputs) for a classifier.
    """

    def forward(inputs: Tensor) -> Tensor:
        outputs: Tensor = module(inputs)
        return outputs

    # PyTorch counts recompilations by code object and compiles at most eight: a copy gives each model its own count.
    forward.__code__ = forward.__code__.replace()
    if backend is True:
        from torch._inductor import list_options

        # Kernels chosen by timing round differently from run to run; older PyTorch has no option "deterministic".
        wanted, offered = {"triton.cudagraphs": device.type == "cuda", "deterministic": True}, list_options()
        graph = torch.compile(
            forward, options={name: wanted[name] for name in wanted if name in offered}, dynamic=False
        )
    else:
        graph = torch.compile(forward, backend=str(backend), dynamic=False)
    return lambda inputs: (graph if len(inputs) == batch_size else forward)(inputs)


#: Floats in the 16 bytes that a kernel reads at once.
VECTOR = 4


def align(layer: nn.Module) -> None:
    """Run a BatchNorm layer on copies of its misaligned [channels] vectors: weight, bias, running mean and variance.

    Tensors of a model are views into one vector and start at any float. On CUDA, BatchNorm of channels-last images reads
    these vectors 16 bytes at a time and fails with "misaligned address" unless a vector starts at a multiple of 16 bytes.
    """
    views: list[tuple[dict[str, Tensor], str, Tensor]] = []

    def before(layer: nn.Module, inputs: object) -> None:
        if torch.compiler.is_compiling():  # compiled kernels handle alignment
            return
        for group in (layer._parameters, layer._buffers):
            tensors = cast("dict[str, Tensor]", group)
            misaligned = [name for name, view in group.items() if view is not None and view.storage_offset() % VECTOR]
            views.extend((tensors, name, tensors[name]) for name in misaligned)
        for tensors, name, view in views:
            tensors[name] = view.clone()

    def after(layer: nn.Module, inputs: object, output: object) -> None:
        with torch.no_grad():
            for tensors, name, view in views:
                if name in layer._buffers and layer.training:
                    view.copy_(tensors[name])
                tensors[name] = view
        views.clear()

    layer.register_forward_pre_hook(before)
    layer.register_forward_hook(after, always_call=True)


def seed_global_stream(seed: int, device: torch.device) -> None:
    """Seed the streams that dropout draws from.

    Not `torch.manual_seed`: on a machine without a GPU it keeps a stack trace of every call, 10 % of a tiny client's time.
    """
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


def streams_kept(device: torch.device) -> AbstractContextManager[None]:
    """Restore the random streams of the CPU and of the device, from which dropout draws, at the end of the block."""
    if device.type == "cpu":
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[device], device_type=device.type)


def _drops(module: nn.Module) -> bool:
    """Return whether a module drops at random: dropout (p), timm's drop path (drop_prob), attention (dropout)."""
    rates = [getattr(module, name, 0) for name in ("p", "drop_prob", "dropout")]
    return any(isinstance(rate, float | int) and rate > 0 for rate in rates)
