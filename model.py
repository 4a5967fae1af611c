"""ResNet for image classification (He et al. 2015, "Deep Residual Learning for Image
Recognition", arXiv:1512.03385), with the state dict of torchvision's `resnet18`, `resnet34`,
`resnet50` and `resnet101`: same keys, same order, same shapes. Weight files fit both ways.
"""

import torch
from torch import Tensor, nn


def _conv3x3(channels_in: int, channels_out: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels_in, channels_out, 3, stride=stride, padding=1, bias=False)


def _conv1x1(channels_in: int, channels_out: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels_in, channels_out, 1, stride=stride, bias=False)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut: the block of ResNet-18 and ResNet-34.

    Maps float `B x channels_in x H x W` to `B x channels x H/stride x W/stride`.
    `downsample` brings the shortcut to that shape where it differs from the input's.
    """

    expansion = 1

    def __init__(
        self,
        channels_in: int,
        channels: int,
        stride: int = 1,
        downsample: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.conv1 = _conv3x3(channels_in, channels, stride)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = _conv3x3(channels, channels)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.bn2(self.conv2(x))
        return self.relu(x + shortcut)


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolution and a shortcut: the block of ResNet-50 and ResNet-101.

    Maps float `B x channels_in x H x W` to `B x 4*channels x H/stride x W/stride`.
    The paper strides in the first 1x1 convolution, which never sees three of four pixels;
    here the 3x3 does it, as in torchvision, so that its published weights mean the same.
    """

    expansion = 4

    def __init__(
        self,
        channels_in: int,
        channels: int,
        stride: int = 1,
        downsample: nn.Module | None = None,
    ) -> None:
        super().__init__()
        channels_out = channels * self.expansion
        self.conv1 = _conv1x1(channels_in, channels)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = _conv3x3(channels, channels, stride)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = _conv1x1(channels, channels_out)
        self.bn3 = nn.BatchNorm2d(channels_out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        x = self.bn3(self.conv3(x))
        return self.relu(x + shortcut)


class ResNet(nn.Module):
    """A residual network: a stem, four stages of blocks, and a linear classifier as its top.

    Args:
        block: `BasicBlock` or `Bottleneck`.
        blocks_per_stage: four block counts.
        num_classes: outputs of the classifier.
        include_top: without it there is neither pooling nor classifier.

    The input is a float `B x 3 x H x W`, normalised with ImageNet's mean and standard
    deviation. The output is the float logits `B x num_classes`, or without the top the feature
    map `B x C x H/32 x W/32`: `7 x 7` for 224 px, C = 512 (BasicBlock) or 2048 (Bottleneck).
    Convolutions start from the normal distribution of He et al. 2015, arXiv:1502.01852
    (fan_out, for ReLU), BatchNorm from weight 1 and bias 0.
    """

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        blocks_per_stage: tuple[int, int, int, int],
        num_classes: int = 1000,
        include_top: bool = True,
    ) -> None:
        super().__init__()
        self.include_top = include_top
        self.channels = 64  # what the next block to be built receives
        self.conv1 = nn.Conv2d(3, self.channels, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(self.channels)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = self._stage(block, 64, blocks_per_stage[0])
        self.layer2 = self._stage(block, 128, blocks_per_stage[1], stride=2)
        self.layer3 = self._stage(block, 256, blocks_per_stage[2], stride=2)
        self.layer4 = self._stage(block, 512, blocks_per_stage[3], stride=2)
        if include_top:
            self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
            self.fc = nn.Linear(self.channels, num_classes)

        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def _stage(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        channels: int,
        blocks: int,
        stride: int = 1,
    ) -> nn.Sequential:
        channels_out = channels * block.expansion
        downsample = None
        if stride != 1 or self.channels != channels_out:
            downsample = nn.Sequential(
                _conv1x1(self.channels, channels_out, stride), nn.BatchNorm2d(channels_out)
            )
        first = block(self.channels, channels, stride, downsample)
        self.channels = channels_out
        return nn.Sequential(first, *(block(channels_out, channels) for _ in range(blocks - 1)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        if not self.include_top:
            return x
        return self.fc(torch.flatten(self.avgpool(x), 1))


def resnet18(num_classes: int = 1000, include_top: bool = True) -> ResNet:
    """ResNet-18: BasicBlocks, 122 state-dict entries with the top. See `ResNet` for shapes."""
    return ResNet(BasicBlock, (2, 2, 2, 2), num_classes, include_top)


def resnet34(num_classes: int = 1000, include_top: bool = True) -> ResNet:
    """ResNet-34: BasicBlocks, 218 state-dict entries with the top. See `ResNet` for shapes."""
    return ResNet(BasicBlock, (3, 4, 6, 3), num_classes, include_top)


def resnet50(num_classes: int = 1000, include_top: bool = True) -> ResNet:
    """ResNet-50: Bottlenecks, 320 state-dict entries with the top. See `ResNet` for shapes."""
    return ResNet(Bottleneck, (3, 4, 6, 3), num_classes, include_top)


def resnet101(num_classes: int = 1000, include_top: bool = True) -> ResNet:
    """ResNet-101: Bottlenecks, 626 state-dict entries with the top. See `ResNet` for shapes."""
    return ResNet(Bottleneck, (3, 4, 23, 3), num_classes, include_top)


# What `--model` offers.
MODELS = {
    "resnet18": resnet18,
    "resnet34": resnet34,
    "resnet50": resnet50,
    "resnet101": resnet101,
}
