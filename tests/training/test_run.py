from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest

from moe.decoding import translate
from moe.errors import UserError
from moe.models import TransformerConfig
from moe.training import CheckpointConfig, Checkpoints, load_model, open_run
from moe.training import train as run_training
from moe.training.run import read_checkpoint, start_run
from tests.training.small import small_config


def train(config):
    return run_training(config, devices=jax.devices()[:1])


def metrics(run_dir, name="loss"):
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[name] for line in lines if name in line}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Six steps without interruption."""
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    outcome = train(small_config(run_dir))
    return run_dir, outcome


@pytest.fixture
def copied(trained, tmp_path):
    import shutil

    return shutil.copytree(trained[0], tmp_path / "copy")


def test_a_run_folder_holds_what_the_other_commands_need(trained):
    run_dir, outcome = trained
    assert outcome.step == 6
    assert outcome.signal is None
    assert list(metrics(run_dir)) == [1, 2, 3, 4, 5, 6]
    assert metrics(run_dir, "validation_loss")[6] == pytest.approx(outcome.validation_loss)
    load = json.loads((run_dir / "load.jsonl").read_text().splitlines()[-1])
    assert np.shape(load["stacks"]["decoder"]["assigned"]) == (1, 8)
    assert list((run_dir / "tensorboard").iterdir())
    run = open_run(run_dir)
    assert run.config == small_config(run_dir)
    assert run.checkpoints().steps() == [4, 6]


def test_a_run_resumed_from_any_checkpoint_gives_the_same_bits(trained, tmp_path):
    run_dir, _ = trained
    resumed = tmp_path / "resumed"
    train(small_config(resumed, steps=2))
    (resumed / "metrics.jsonl").open("a").write('{"step": 99, "los')  # killed while writing
    train(small_config(resumed))
    assert metrics(resumed) == metrics(run_dir)
    ours, theirs = (load_model(open_run(path), "last")[0] for path in (resumed, run_dir))
    jax.tree.map(
        np.testing.assert_array_equal, *(jax.tree.leaves(_state(m)) for m in (ours, theirs))
    )


def _state(model):
    from flax import nnx

    return nnx.state(model)


def test_a_finished_run_stays_as_it_is(copied):
    before = metrics(copied)
    assert train(small_config(copied)).step == 6
    assert metrics(copied) == before


@pytest.mark.slow
def test_a_run_goes_on_for_longer_and_on_another_mesh(copied):
    config = small_config(copied, steps=7)
    mesh = dataclasses.replace(config.mesh, data=2, expert=4)
    outcome = run_training(dataclasses.replace(config, mesh=mesh))
    assert outcome.step == 7
    assert list(metrics(copied)) == [1, 2, 3, 4, 5, 6, 7]


def test_how_a_run_is_computed_may_change_with_its_devices(copied):
    config = small_config(copied)
    pairs = config.source.pairs("train")
    options = {"remat": "full", "dispatch": "einsum", "exchange_chunks": 2, "pipeline_rounds": 2}
    other = dataclasses.replace(config.model, **options)
    assert start_run(dataclasses.replace(config, model=other), pairs).config.model == other


def test_another_configuration_is_refused_and_nothing_is_touched(copied):
    before = {p: p.read_bytes() for p in copied.rglob("*") if p.is_file()}
    other = dataclasses.replace(small_config(copied).model, d_hidden=48)
    with pytest.raises(UserError, match=r"model.d_hidden must stay .* got 48, not 32"):
        train(small_config(copied, model=other))
    assert {p: p.read_bytes() for p in copied.rglob("*") if p.is_file()} == before


def test_another_number_of_experts_is_refused_with_the_command_that_makes_it(copied):
    other = dataclasses.replace(small_config(copied).model, num_experts=16)
    command = rf"moe upcycle {copied} NEW_RUN --num-experts 16"
    with pytest.raises(UserError, match=f"num_experts must stay .* got 16, not 8. `{command}`"):
        train(small_config(copied, model=other))


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(UserError, match=r"run_dir must be a run, empty or new: got .*thesis.tex"):
        start_run(small_config(tmp_path), small_config(tmp_path).source.pairs("train"))
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_damaged_checkpoint_is_told_and_not_used(copied):
    message = r"checkpoints/6 must be complete and unchanged.*step 4"
    files = list((copied / "checkpoints" / "6").rglob("d/*"))
    largest = max(files, key=lambda file: file.stat().st_size)
    damage(largest, [largest.stat().st_size // 2])
    with pytest.raises(UserError, match=message):
        read_checkpoint(open_run(copied), "last")
    for file in files:  # a model reads the parameters alone, and they may lie in any
        damage(file, range(5, file.stat().st_size, 100))
    with pytest.raises(UserError, match=message):
        load_model(open_run(copied), "last")


def damage(file, places) -> None:
    data = bytearray(file.read_bytes())
    for place in places:
        data[place] ^= 0xFF
    file.write_bytes(data)


def test_a_checkpoint_with_a_missing_file_is_told(copied):
    import shutil

    shutil.rmtree(copied / "checkpoints" / "6" / "state" / "d")
    with pytest.raises(UserError, match="checkpoints/6 must be complete"):
        train(small_config(copied, steps=8))


def test_a_half_written_checkpoint_is_never_taken_for_a_good_one(copied):
    """What a kill leaves: Orbax writes under a temporary name and renames at the end."""
    import shutil

    source = copied / "checkpoints" / "6"
    shutil.copytree(source, copied / "checkpoints" / "8.orbax-checkpoint-tmp")
    assert open_run(copied).checkpoints().latest() == 6


def test_the_best_and_the_newest_checkpoints_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", CheckpointConfig(keep_last=2))
    for step, loss in enumerate([5.0, 1.0, 4.0, None, 3.0], start=1):
        checkpoints.save(step, {"w": np.full(3, step)}, {"next": step}, validation_loss=loss)
    checkpoints.wait()
    assert checkpoints.steps() == [2, 4, 5]
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"2", "4", "5"}
    assert (checkpoints.best(), checkpoints.latest()) == (2, 5)
    state, data = checkpoints.restore(2, {"w": np.zeros(3, int)})
    np.testing.assert_array_equal(state["w"], 2)
    assert data == {"next": 2}


def test_the_tokenizer_of_another_run_is_refused(copied):
    (copied / "tokenizer.model").write_bytes(b"")
    with pytest.raises(UserError, match="tokenizer"):
        open_run(copied)


def test_a_tokenizer_that_changed_is_refused(copied):
    config = json.loads((copied / "config.json").read_text())
    config["tokenizer_sha256"] = "0" * 64
    (copied / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="tokenizer must be the one the run was trained with"):
        open_run(copied)


@pytest.mark.parametrize(
    "text", ["", "{}", '{"config": {"steps": "many"}, "tokenizer_sha256": ""}']
)
def test_a_broken_configuration_is_refused(copied, text):
    (copied / "config.json").write_text(text)
    with pytest.raises(
        UserError, match=r"config must be what `moe train` wrote: got .*config.json"
    ):
        open_run(copied)


@pytest.mark.parametrize("checkpoint", ["5", "worst"])
def test_an_unknown_checkpoint_is_refused_with_those_there_are(trained, checkpoint):
    with pytest.raises(UserError, match=rf"best, last or one of \[4, 6\]: got '{checkpoint}'"):
        load_model(open_run(trained[0]), checkpoint)


def test_too_many_steps_with_a_nan_gradient_end_the_run(tmp_path, monkeypatch):
    from moe.training import loop

    make_train_step = loop.make_train_step

    def poisoned(*args):
        step = make_train_step(*args)

        def run(state, batch, key, *rest):
            return step(jax.tree.map(lambda x: x * np.nan if x.ndim > 2 else x, state), batch, key)

        return run

    monkeypatch.setattr(loop, "make_train_step", poisoned)
    with pytest.raises(
        UserError, match=r"gradients must be finite: got NaN or infinity in 3 steps in a row"
    ):
        train(
            small_config(
                tmp_path / "run", max_skipped_in_a_row=3, checkpoint=CheckpointConfig(every=50)
            )
        )


def test_the_vocabulary_of_the_model_is_the_tokenizers(trained):
    run = open_run(trained[0])
    assert run.model_config == dataclasses.replace(
        run.config.model, vocab_size=run.tokenizer.vocab_size
    )
    assert isinstance(run.model_config, TransformerConfig)


@pytest.mark.slow
def test_a_run_with_a_vocabulary_for_its_sources_trains_goes_on_and_translates(tmp_path):
    config = small_config(tmp_path / "run", steps=2)
    own = dataclasses.replace(config.tokenizer, source_vocab_size=380)
    config = dataclasses.replace(config, tokenizer=own)
    train(config)
    train(dataclasses.replace(config, steps=4))
    run = open_run(tmp_path / "run")
    assert run.model_config.source_vocab_size == run.tokenizer.source.vocab_size == 380
    model, step = load_model(run, "last")
    assert step == 4
    assert model.source_embedding_VM.shape == (380, 16)
    assert len(translate(model, run.tokenizer, ["the big dog"], target_lang="qaa")) == 1
    (run.path / "source_tokenizer.model").unlink()
    with pytest.raises(UserError, match=r"source_tokenizer\.model if the run has one"):
        open_run(run.path)


def test_rows_that_do_not_divide_over_the_devices_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"batch_size must be .* got 8 rows for 3 devices"):
        run_training(small_config(tmp_path / "run"), devices=jax.devices()[:3])
    assert not (tmp_path / "run").exists()
