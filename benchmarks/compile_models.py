"""The models whose cold start is measured, with random weights: of the zoo, of transformers and, where installed, of torchvision."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Example = tuple[nn.Module, tuple[Any, ...]]
ONE_OPERATION = "one operation"
"""What a compiler takes for the least that there is."""
MODELS = (
    "Llama 2",
    "Llama 16",
    "Llama 48",
    "BERT 12",
    "ViT 12",
    "ResNet-50",
    "Inception v3",
    "MobileNet v2",
    "UNet",
)


class OneOperation(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1


class _Double(nn.Sequential):
    """Two convolutions, as at every level of a UNet."""

    def __init__(self, inputs: int, outputs: int) -> None:
        layers: list[nn.Module] = []
        for channels in (inputs, outputs):
            layers += [nn.Conv2d(channels, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
        super().__init__(*layers)


class UNet(nn.Module):
    """An encoder, a decoder and connections between them: every level has other sizes."""

    def __init__(self, width: int, levels: int = 4) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels + 1)]
        self.first = _Double(3, width)
        self.down = nn.ModuleList(_Double(w, 2 * w) for w in widths[:-1])
        self.rise = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in reversed(widths[:-1]))
        self.up = nn.ModuleList(_Double(2 * w, w) for w in reversed(widths[:-1]))
        self.last = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skipped = [self.first(x)]
        for down in self.down:
            skipped.append(down(functional.max_pool2d(skipped[-1], 2)))
        x = skipped.pop()
        for rise, up in zip(self.rise, self.up, strict=True):
            x = up(torch.cat([skipped.pop(), rise(x)], dim=1))
        return self.last(x)


def build(name: str, device: str) -> Example:
    """Return a model in eval mode and its inputs; on a GPU in bfloat16 and larger, images in channels last."""
    torch.manual_seed(0)
    if name == ONE_OPERATION:
        return OneOperation(), (torch.randn(64, 64, device=device),)
    is_gpu = device == "cuda"
    model, args = _text(name, is_gpu) if name.split()[0] in ("Llama", "BERT") else _vision(name, is_gpu)
    dtype = torch.bfloat16 if is_gpu else torch.float32
    model = model.eval().to(device, dtype)
    args = tuple(a.to(device, dtype) if a.is_floating_point() else a.to(device) for a in args)
    if is_gpu and args[0].dim() == 4:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        args = tuple(a.to(memory_format=torch.channels_last) for a in args)
    return model, args


def _text(name: str, is_gpu: bool) -> Example:
    import transformers

    kind, _, layers = name.partition(" ")
    ids = torch.randint(0, 1000, (1, 512) if is_gpu else (1, 64))
    if kind == "BERT":
        sizes = {} if is_gpu else {"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024}
        config: Any = transformers.BertConfig(num_hidden_layers=int(layers), **sizes)
        return transformers.BertModel(config), (ids,)
    width, hidden = (2048, 5632) if is_gpu else (256, 704)
    heads = (32, 8) if is_gpu else (4, 2)
    config = transformers.LlamaConfig(
        vocab_size=32000 if is_gpu else 1000,
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=int(layers),
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config), (ids,)


def _vision(name: str, is_gpu: bool) -> Example:
    import transformers

    batch, size = (16, 224) if is_gpu else (1, 64)
    images = torch.randn(batch, 3, size, size)
    if name == "UNet":
        return UNet(64 if is_gpu else 16), (images,)
    if name.startswith("ViT"):
        sizes = {} if is_gpu else {"hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768}
        config: Any = transformers.ViTConfig(
            image_size=size, patch_size=16 if is_gpu else 8, num_hidden_layers=int(name.split()[1]), **sizes
        )
        return transformers.ViTModel(config), (images,)
    if is_gpu:
        return _torchvision(name, images)
    if name == "ResNet-50":
        return transformers.ResNetForImageClassification(transformers.ResNetConfig()), (images,)
    if name == "MobileNet v2":
        config = transformers.MobileNetV2Config(image_size=size)
        return transformers.MobileNetV2ForImageClassification(config), (images,)
    from dovetail import zoo

    entry = zoo.get("inception")
    return entry.build("small"), tuple(entry.example_inputs("small", batch=1).args)


def _torchvision(name: str, images: Tensor) -> Example:
    import torchvision  # type: ignore[import-not-found]

    if name == "ResNet-50":
        return torchvision.models.resnet50(weights=None), (images,)
    if name == "MobileNet v2":
        return torchvision.models.mobilenet_v2(weights=None), (images,)
    model = torchvision.models.inception_v3(weights=None, init_weights=False)
    return model, (torch.randn(len(images), 3, 299, 299),)
