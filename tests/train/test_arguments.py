from __future__ import annotations

import pytest

from gpulayer.errors import UsageError
from gpulayer.train.arguments import NOT_YET, TrainerArguments, limited
from gpulayer.train.trainer import Trainer


def test_arguments_have_lightnings_defaults():
    arguments = TrainerArguments()
    assert (arguments.max_epochs, arguments.max_steps, arguments.precision) == (1000, -1, "32-true")
    assert TrainerArguments(max_steps=5).max_epochs == -1
    assert TrainerArguments(devices=-1).devices == "auto"
    assert TrainerArguments(devices="2").devices == 2


@pytest.mark.parametrize(
    "given",
    [
        {"max_epochs": -2},
        {"max_epochs": 1.5},
        {"max_steps": True},
        {"num_nodes": 0},
        {"devices": 0},
        {"devices": [0, 1]},
        {"accelerator": "tpu"},
        {"strategy": "fsdp"},
        {"precision": "8"},
        {"gradient_clip_val": -1},
        {"gradient_clip_val": "a"},
        {"gradient_clip_algorithm": "max"},
        {"accumulate_grad_batches": 0},
        {"limit_train_batches": 0},
        {"limit_train_batches": 0.0},
        {"limit_val_batches": 1.5},
        {"limit_val_batches": False},
        {"check_val_every_n_epoch": 0},
        {"log_every_n_steps": -1},
        {"enable_progress_bar": "yes"},
        {"enable_checkpointing": 1},
        {"inference_mode": None, "seed": -1},
        {"logger": "tensorboard"},
        {"callbacks": [object()]},
    ],
)
def test_trainer_refuses_a_value_that_cannot_work_and_names_it(given):
    with pytest.raises(UsageError) as caught:
        Trainer(**given)
    assert any(name in str(caught.value) for name in given)


@pytest.mark.parametrize("name", NOT_YET)
def test_trainer_takes_lightnings_default_of_what_is_not_supported_and_refuses_the_rest(name):
    for idle in NOT_YET[name]:
        Trainer(**{name: idle}, logger=False)
    with pytest.raises(UsageError, match=f"{name}='something'.*not support it yet"):
        Trainer(**{name: "something"})


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("max_epoch", "max_epochs"), ("num_node", "num_nodes"), ("callback", "callbacks"), ("gradient_clip", "gradient_clip_val")],
)
def test_trainer_names_the_nearest_argument(wrong, right):
    with pytest.raises(UsageError, match=f"no argument '{wrong}'; did you mean '{right}'"):
        Trainer(**{wrong: 1})


def test_limited_counts_batches_or_takes_a_share():
    assert [limited(10, None), limited(10, 3), limited(10, 30), limited(10, 0.25), limited(None, 4), limited(None, 0.5)] == [
        10,
        3,
        10,
        2,
        4,
        None,
    ]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpus", "devices="),
        ("resume_from_checkpoint", "fit\\(ckpt_path=...\\).*not support it yet"),
        ("num_processes", "devices="),
    ],
)
def test_trainer_points_from_an_old_argument_to_the_new_one(name, message):
    with pytest.raises(UsageError, match=f"no argument '{name}'; .*{message}"):
        Trainer(**{name: 1})
