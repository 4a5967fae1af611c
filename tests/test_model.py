"""The ResNets: torchvision's state dict, shapes, and initialisation."""

import math

import pytest
import torch
import torchvision

import model


@pytest.mark.parametrize("name", ["resnet18", "resnet34", "resnet50", "resnet101"])
def test_state_dict_is_torchvisions(name):
    with torch.device("meta"):  # shapes alone, without the memory
        ours = model.MODELS[name](num_classes=7).state_dict()
        theirs = getattr(torchvision.models, name)(num_classes=7).state_dict()
    assert [(key, value.shape, value.dtype) for key, value in ours.items()] == [
        (key, value.shape, value.dtype) for key, value in theirs.items()
    ]


def test_resnet34_has_218_entries_and_the_known_parameter_count():
    network = model.resnet34(num_classes=5)
    assert len(network.state_dict()) == 218
    assert sum(parameter.numel() for parameter in network.parameters()) == 21_287_237


def test_default_is_imagenets_1000_classes():
    with torch.device("meta"):
        assert model.resnet18().fc.out_features == 1000


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])  # one of each block
def test_same_weights_give_torchvisions_output(name):
    torch.manual_seed(0)
    ours = model.MODELS[name](num_classes=3).eval()
    with torch.device("meta"):  # no time for an initialisation that is thrown away
        theirs = getattr(torchvision.models, name)(num_classes=3).eval()
    theirs.load_state_dict(ours.state_dict(), assign=True)
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(ours(images), theirs(images))


@pytest.mark.parametrize(("name", "channels"), [("resnet34", 512), ("resnet50", 2048)])
def test_without_the_top_it_returns_the_feature_map(name, channels):
    with torch.device("meta"):
        network = model.MODELS[name](include_top=False)
        features = network(torch.zeros(2, 3, 224, 224))
    assert features.shape == (2, channels, 7, 7)
    assert not any(key.startswith("fc.") for key in network.state_dict())


def test_convolutions_start_from_kaiming_normal_fan_out():
    torch.manual_seed(0)
    convolution = model.resnet18(num_classes=2).layer3[0].conv1  # fan_in is half of fan_out
    fan_out = convolution.out_channels * 3 * 3
    assert convolution.weight.std().item() == pytest.approx(math.sqrt(2 / fan_out), rel=0.01)
    assert abs(convolution.weight.mean().item()) < 1e-3


def test_every_parameter_gets_a_gradient():
    network = model.resnet18(num_classes=2)
    network(torch.randn(2, 3, 32, 32)).sum().backward()
    assert all(parameter.grad is not None for parameter in network.parameters())
