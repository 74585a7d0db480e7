"""Pictures of all kinds: transparent parts are white wherever a picture comes from, and no side is read as channels."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image, ImageDraw
from support.models.family_models import tiny

from envs.adapters.openenv_members import image_of
from envs.adapters.pictures import on_white
from ragen_pl.agent_programs.serving.images import ImageReader
from ragen_pl.base.rgb import rgb_array
from ragen_pl.environments.answers import AnswerReader
from ragen_pl.models.small_vlm.processing import SmallVLMImageProcessor


def lines(mode: str) -> Image.Image:
    """Return a black square on a clear ground whose hidden color is black, as drawing programs save it."""
    image = Image.new("RGBA", (64, 48), (0, 0, 0, 0))
    ImageDraw.Draw(image).rectangle((20, 10, 39, 29), (0, 0, 0, 255))
    if mode == "P bytes":
        # an alpha for each entry
        palette = image.quantize(4)
        assert isinstance(palette.info.get("transparency", b""), bytes)
        return palette
    if mode in ("P", "L", "RGB"):
        # one color that is clear
        flat = Image.new("L", (64, 48), 5)
        ImageDraw.Draw(flat).rectangle((20, 10, 39, 29), 0)
        flat = flat.convert(mode)
        flat.info["transparency"] = (5, 5, 5) if mode == "RGB" else 5
        return flat
    return image.convert(mode)


MODES = ("RGBA", "LA", "PA", "P bytes", "P", "L", "RGB")
FILES = ("RGBA", "LA", "P bytes", "P", "L", "RGB")


def file_of(image: Image.Image, kind: str) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **({"lossless": True} if kind == "WEBP" else {}))
    return file.getvalue()


def url_of(image: Image.Image, kind: str = "PNG") -> str:
    data = base64.b64encode(file_of(image, kind)).decode()
    return f"data:image/{kind.lower()};base64,{data}"


def observed(image: Image.Image | np.ndarray) -> np.ndarray:
    (shown,) = AnswerReader(target="mine").observation({"text": "", "image": image}).images
    return shown


WAYS: dict[str, Callable[[Image.Image], np.ndarray]] = {
    "endpoint": lambda image: ImageReader().read(url_of(image))[1],
    "adapter": lambda image: image_of(url_of(image)),
    "observation": observed,
    "file of an observation": lambda image: observed(Image.open(io.BytesIO(file_of(image, "PNG")))),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", FILES)
def test_clear_ground_is_white(mode, way):
    shown = WAYS[way](lines(mode))
    assert shown.shape == (48, 64, 3) and shown.dtype == np.uint8
    assert (shown[10:30, 20:40] == 0).all()
    shown = shown.copy()
    shown[10:30, 20:40] = 255
    assert (shown == 255).all()


@pytest.mark.parametrize("mode", MODES)
def test_environments_and_the_trainer_read_alike(mode):
    image = lines(mode)
    assert np.array_equal(on_white(image), rgb_array(image))
    assert np.array_equal(
        SmallVLMImageProcessor()(image)["pixel_values"][0].permute(1, 2, 0).numpy(),
        rgb_array(image),
    )


def test_webp_and_half_transparent_colors():
    image = Image.new("RGBA", (4, 4), (200, 0, 0, 51))
    shown = ImageReader().read(url_of(image, "WEBP"))[1]
    # a fifth of the color, four fifths of white
    assert np.abs(shown.astype(int) - [244, 204, 204]).max() <= 1


def test_gray_of_16_bits_is_scaled(tmp_path):
    levels = np.linspace(0, 65535, 48, dtype=np.uint16).reshape(6, 8)
    for image in (Image.fromarray(levels), Image.fromarray(levels.astype(np.int32))):
        expected = np.rint(levels / 257)[..., None]
        for shown in (
            observed(image),
            on_white(image),
            *([WAYS["endpoint"](image)] if image.mode == "I;16" else []),
        ):
            assert shown.shape == (6, 8, 3) and (shown == expected).all()


@pytest.mark.parametrize("turn", [3, 6, 8])
def test_a_picture_is_turned_as_its_file_says(turn):
    image = Image.fromarray(np.arange(24, dtype=np.uint8).reshape(4, 6))
    upright = np.rot90(np.asarray(image), {3: 2, 6: -1, 8: 1}[turn])
    image.getexif()[0x112] = turn
    file = io.BytesIO()
    image.save(file, "PNG", exif=image.getexif())
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    for shown in (
        ImageReader().read(url)[1],
        on_white(Image.open(file)),
        observed(Image.open(file)),
    ):
        assert (shown == upright[..., None]).all()


def test_arrays_of_one_to_four_channels():
    gray = np.arange(35, dtype=np.uint8).reshape(5, 7)
    color = np.stack([gray, gray + 1, gray + 2], -1)
    half = np.full((5, 7, 1), 128, np.uint8)
    assert (observed(gray) == gray[..., None]).all()
    assert (observed(gray[..., None]) == gray[..., None]).all()
    assert np.array_equal(observed(color), color)
    for array in (
        np.concatenate([gray[..., None], half], -1),
        np.concatenate([color, half], -1),
    ):
        expected = (array[..., :-1] * 128.0 + 255 * 127) / 255
        assert np.abs(observed(array) - expected).max() <= 1


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((3, 8, 8), np.uint8),
        np.zeros((8, 8, 5), np.uint8),
        np.zeros((8, 8, 3), np.float32),
        np.zeros((0, 8, 3), np.uint8),
        np.zeros(8, np.uint8),
    ],
    ids=lambda array: str(array.shape),
)
def test_other_arrays_are_refused(array):
    with pytest.raises(TypeError, match="mine returned an image of shape"):
        observed(array)


@pytest.mark.parametrize("height", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3_vl", "lfm2_vl"])
def test_low_pictures_are_not_read_channels_first(name, height):
    """A picture of three or four rows is what it is as Pillow's image, of which the channels are known."""
    bundle = tiny(name)
    array = np.zeros((height, 60, 3), np.uint8)
    array[:, :30] = 255
    found = bundle.images.inputs([[array]])
    own = bundle.processor(
        images=[[Image.fromarray(array)]],
        text=[bundle.images.slot],
        return_tensors="pt",
        **bundle.image_settings,
    )
    for key, value in found.items():
        assert np.array_equal(value.numpy(), own[key].numpy()), key
    assert bundle.num_image_tokens(array) > 0
