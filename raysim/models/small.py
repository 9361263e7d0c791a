"""Small networks, layer by layer. Tests fix the names and the order of their leaves."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Annotated, Literal

from torch import nn

from raysim.base.options import Bounds
from raysim.models.architecture import Architecture, Shape
from raysim.models.parts import Depth, Groups, Norm, Width, library, named_layers, norm_layer, projector, unfit_option


def cnn(
    shape: Shape,
    classes: int,
    *,
    width: Width = 32,
    hidden: Width = 512,
    norm: Literal["none", "batch", "group"] = "none",
    groups: Groups = 2,
    activation: Literal["relu", "tanh"] = "relu",
    pool: Literal["max", "average"] = "max",
) -> nn.Module:
    """Two 5x5 convolutions, each with 2x2 pooling, and a hidden layer: like LeNet, with more channels.

    With the default widths, 3 x 32 x 32 inputs and 10 classes: 2,156,490 parameters.

    Args:
      width: channels of the first convolution; the second has twice as many.
      hidden: width of the hidden layer.
      norm: normalisation after each convolution.
      groups: groups of GroupNorm, with norm "group".
      activation, pool: tanh and average make the network smooth: small changes of parameters change gradients little.
    """
    height, breadth, channels = shape
    pixels = (height // 4) * (breadth // 4)
    if not pixels:
        raise ValueError(f"{height} x {breadth} images are smaller than 4 x 4")
    make_norm = norm_layer(norm, groups)
    bend = {"relu": nn.ReLU, "tanh": nn.Tanh}[activation]
    make_pool = {"max": nn.MaxPool2d, "average": nn.AvgPool2d}[pool]
    layers: dict[str, nn.Module] = {}
    for number, (inputs, outputs) in enumerate(((channels, width), (width, 2 * width)), 1):
        last: dict[str, nn.Module] = {f"{activation}{number}": bend(), f"pool{number}": make_pool(2)}
        if activation == "relu" and pool == "max":  # pooling first: the same bits, ReLU on a quarter of the entries
            last = dict(reversed(last.items()))
        layers |= {
            f"conv{number}": nn.Conv2d(inputs, outputs, 5, padding=2),
            f"norm{number}": make_norm(outputs),
            **last,
        }
    layers |= {"flatten": nn.Flatten(), "fc1": nn.Linear(2 * width * pixels, hidden)}
    return named_layers(**layers, **{f"{activation}3": bend()}, fc2=nn.Linear(hidden, classes))


def lenet(shape: Shape, classes: int, *, padding: int = 0) -> nn.Module:
    """LeNet-5 with max pooling and ReLU, as in federated learning; 61,706 parameters for 1 x 32 x 32 and 10 classes.

    Args:
      padding: padding of the first convolution: 2 pads 28 x 28 images to LeNet's 32 x 32.
    """
    height, breadth, channels = shape
    rows, columns = (((side + 2 * padding - 4) // 2 - 4) // 2 for side in (height, breadth))
    if min(rows, columns) < 1:
        raise ValueError(f"{height} x {breadth} images with padding {padding} are smaller than 16 x 16")
    return named_layers(
        conv1=nn.Conv2d(channels, 6, 5, padding=padding),
        pool1=nn.MaxPool2d(2),  # before ReLU: the same bits, ReLU on a quarter of the entries
        relu1=nn.ReLU(),
        conv2=nn.Conv2d(6, 16, 5),
        pool2=nn.MaxPool2d(2),
        relu2=nn.ReLU(),
        flatten=nn.Flatten(),
        fc1=nn.Linear(16 * rows * columns, 120),
        relu3=nn.ReLU(),
        fc2=nn.Linear(120, 84),
        relu4=nn.ReLU(),
        fc3=nn.Linear(84, classes),
    )


def mlp(
    shape: Shape, classes: int, *, hidden: Width | Annotated[list[Width], Bounds(min_length=1, max_length=2000)] = 64
) -> nn.Module:
    """Dense layers with ReLU on images, table rows or other numbers of any shape, flattened.

    Layers: `fc1`, further hidden layers `hidden2`, `hidden3`, ... if any, each with ReLU, and the classifier `fc2`.

    Args:
      hidden: width of the hidden layer, or of each hidden layer, such as [64, 32].
    """
    widths = [hidden] if isinstance(hidden, int) else hidden
    layers: dict[str, nn.Module] = {"fc1": nn.Linear(math.prod(shape), widths[0]), "relu": nn.ReLU()}
    for number, (inputs, outputs) in enumerate(pairwise(widths), 2):
        layers |= {f"hidden{number}": nn.Linear(inputs, outputs), f"relu{number}": nn.ReLU()}
    return named_layers(flatten=nn.Flatten(), **layers, fc2=nn.Linear(widths[-1], classes))


#: Convolutions of UniVarFL's small network: output channels, kernel size, stride.
UNIVARFL = ((16, 3, 1), (16, 1, 1), (32, 3, 2), (32, 3, 1), (32, 1, 1), (64, 3, 2), (64, 3, 1), (64, 1, 1))


def univarfl_cnn(
    shape: Shape, classes: int, *, projector_width: Width = 256, norm: Norm = "batch", groups: Groups = 2
) -> nn.Module:
    """UniVarFL's network for STL-10: eight unpadded convolutions without bias, and a two-layer projector.

    The appendix of the paper that describes the network is missing; this is the network of FedUV, on which UniVarFL
    builds.

    Args:
      projector_width: width of both layers of the projector.
      norm: normalisation after each convolution.
      groups: groups of GroupNorm, with norm "group".
    """
    make_norm = norm_layer(norm, groups)
    layers: dict[str, nn.Module] = {}
    channels, side = shape[2], min(shape[:2])
    for number, (width, kernel, stride) in enumerate(UNIVARFL, 1):
        layers[f"conv{number}"] = nn.Conv2d(channels, width, kernel, stride, bias=False)
        layers[f"norm{number}"] = make_norm(width)
        layers[f"relu{number}"] = nn.ReLU()
        channels, side = width, (side - kernel) // stride + 1
    if side < 1:
        raise ValueError(f"{shape[0]} x {shape[1]} images are smaller than 21 x 21")
    return named_layers(
        **layers,
        pool=nn.AdaptiveAvgPool2d(1),
        flatten=nn.Flatten(),
        projector=projector(channels, projector_width, norm_layer(norm, groups, dims=1)),
        fc=nn.Linear(projector_width, classes),
    )


def resnet20(
    shape: Shape, classes: int, *, width: Width = 16, norm: Norm = "batch", groups: Groups = 2, depth: Depth = 20
) -> nn.Module:
    """The residual network of He et al. 2016 (CVPR, section 4.2) for CIFAR: 3x3 stem, three stages of basic blocks.

    The defaults have 19 convolutions of 3x3, two of 1x1 on the shortcuts, and the classifier: 272,474 parameters on
    3 x 32 x 32 inputs with 10 classes. Shortcuts between stages are 1x1 convolutions with normalisation, the paper's
    option B; for CIFAR the paper uses option A, zeros for the new channels.

    Args:
      width: channels of the first stage; the second and the third have twice and four times as many, at half the height
        and width of the stage before.
      norm: normalisation after each convolution.
      groups: groups of GroupNorm, with norm "group".
      depth: 6 n + 2, for n blocks per stage.
    """
    if depth < 8 or depth % 6 != 2:
        raise unfit_option(f"depth must be 6 n + 2 (8, 14, 20, ...), got {depth}")
    make_block, make_norm = library("torchvision.models.resnet").BasicBlock, norm_layer(norm, groups)
    layers: dict[str, nn.Module] = {
        "conv1": nn.Conv2d(shape[2], width, 3, padding=1, bias=False),
        "norm1": make_norm(width),
        "relu1": nn.ReLU(),
    }
    inputs = width
    for stage, outputs in enumerate((width, 2 * width, 4 * width), 1):
        blocks = []
        for number in range(depth // 6):
            stride, shortcut = 1, None
            if stage > 1 and not number:
                stride = 2
                shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), make_norm(outputs))
            blocks.append(make_block(inputs, outputs, stride, shortcut, norm_layer=make_norm))
            inputs = outputs
        layers[f"layer{stage}"] = nn.Sequential(*blocks)
    module = named_layers(**layers, pool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(), fc=nn.Linear(inputs, classes))
    for part in module.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")
    return module


SMALL = {
    "cnn": Architecture(cnn, "fc2", prefers_channels_last=True),
    "lenet": Architecture(lenet, "fc3", prefers_channels_last=True),
    "mlp": Architecture(mlp, "fc2", inputs="numbers"),
    "resnet20": Architecture(resnet20, "fc", prefers_channels_last=True, size=32),
    "univarfl_cnn": Architecture(univarfl_cnn, "fc", prefers_channels_last=True, size=96),
}
