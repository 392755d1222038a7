"""The batch contract in trainers that others wrote: tests of what they really hand to a model."""

import math
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import datasets
import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import find_batch_size
from packaging.version import Version
from torch.utils.data import DataLoader

from packing.errors import OptionError
from packing.loader import PackedDataset, check_batch, collate
from packing.pipeline import PackOptions, pack_dataset
from packing.sample import CHATS, TOKENIZER
from packing.shards import open_shards
from packing.trainers import check_trainer, whole_steps
from training.kernels import KernelError, bind

EXACT = "positions, cu_seq_lens, seq_idx"
FP32 = 1e-5
"""Relative: losses are sums over some hundred tokens, each rounded to 2**-24."""

REFUSES = Version(transformers.__version__) >= Version("5.23")
"""Since then the reference kernels raise when they are given boundaries."""

NAMES = [
    "with_trainer",
    "with_trl_collator",
    "with_trl_collate",
    "with_accelerate",
    "with_lightning",
    "plain_torch",
]
every_trainer = pytest.mark.parametrize("name", NAMES)


def test_no_example_is_forgotten(trainers: ModuleType) -> None:
    """Every script in benchmarks/examples is among the names that the tests run over."""
    scripts = sorted(path.stem for path in trainers.EXAMPLES.glob("*.py"))
    assert scripts == sorted(NAMES) == sorted(trainers.TRAINERS)


@every_trainer
def test_boundaries_arrive_and_no_example_sees_another(
    name: str, trainers: ModuleType, data: Any, dense_run: Callable[[str], Any]
) -> None:
    """Each call gets whole buffers, all three forms of boundaries, no mask; one example moves no other.

    The model is a stock Qwen3: its attention finds packed sequences by itself as long as nothing hides them.
    """
    run, shards = dense_run(name), open_shards(data.shards)
    assert all(call.kwargs["use_cache"] is False for call in run.calls)
    for call in run.trained:
        assert trainers.arrived(call, trainers.lengths_of(call, shards)) == EXACT
    first = run.trained[0]
    assert trainers.isolation(run.model, first, trainers.lengths_of(first, shards)).holds
    rows = [row for call in run.trained for row in trainers.rows_of(call, shards)]
    epoch, next_epoch = rows[: len(shards)], rows[len(shards) :]
    assert sorted(epoch) == list(range(len(shards)))
    assert next_epoch != epoch[: len(next_epoch)]


@every_trainer
def test_loss_and_gradient_are_those_of_every_example_by_itself(
    name: str, trainers: ModuleType, data: Any, dense_run: Callable[[str], Any]
) -> None:
    """In every step, accumulated or not, loss and gradient norm are ours: the mean over the step's tokens."""
    run, shards = dense_run(name), open_shards(data.shards)
    rows = [trainers.rows_of(call, shards) for call in run.trained]
    steps = trainers.steps_of(name, [rows])
    assert len(run.logs) == len(steps)
    assert trainers.apart(run.logs, trainers.each_alone(data.dense, shards, steps)) < FP32


@pytest.mark.parametrize("name", NAMES[:3])
def test_evaluation_is_the_mean_over_batches_of_the_mean_over_tokens(
    name: str, trainers: ModuleType, data: Any, dense_run: Callable[[str], Any]
) -> None:
    """An eval_loss weighs batches alike: with one buffer a batch it is the mean over buffers."""
    run = dense_run(name)
    ours = trainers.evaluation_alone(run.model, open_shards(data.shards).part("eval"))
    assert run.evaluations == [pytest.approx(ours, rel=FP32)]


@pytest.mark.parametrize("name", NAMES[:5])
def test_resumed_from_a_checkpoint_nothing_differs(
    name: str, trainers: ModuleType, data: Any, dense_run: Callable[[str], Any]
) -> None:
    """Stopped after two steps and resumed in the middle of an epoch, the weights end as the same bits."""
    run = dense_run(name)
    checkpoint = data.folder / name / trainers.CHECKPOINTS[name]
    again = trainers.run_example(name, data.shards, data.dense, data.folder / name, checkpoint, bound=False)
    assert [log["loss"] for log in again.logs[-2:]] == [log["loss"] for log in run.logs[-2:]]
    assert len(again.trained) < len(run.trained)
    assert trainers.same_weights(run.model, again.model)


@every_trainer
def test_one_call_of_bind_isolates_qwen3_5(name: str, trainers: ModuleType, data: Any) -> None:
    """A hybrid model that was bound is isolated in every trainer, and its first step's loss is ours."""
    run = trainers.run_example(name, data.shards, data.hybrid, data.folder / f"{name}-bound")
    shards = open_shards(data.shards)
    first = run.trained[0]
    assert trainers.isolation(run.model, first, trainers.lengths_of(first, shards)).holds
    rows = [trainers.rows_of(call, shards) for call in run.trained]
    ours = trainers.each_alone(data.hybrid, shards, trainers.steps_of(name, [rows])[:1])
    assert trainers.apart(run.logs[:1], ours) < 10 * FP32  # the recurrence's sums are longer


@every_trainer
def test_stock_qwen3_5_is_refused_or_leaks(name: str, trainers: ModuleType, data: Any) -> None:
    """Without `bind`, transformers from 5.23 refuses our batches and 5.17 lets examples see each other."""
    found = trainers.leak_of_stock(name, data.shards, data.hybrid, data.folder / f"{name}-stock")
    if REFUSES:
        assert found == "refused"
    else:
        assert float(found.removeprefix("leaks: ")) > 1.0


def test_two_ranks_share_the_buffers_and_take_the_same_steps(trainers: ModuleType, data: Any) -> None:
    """Under torchrun no buffer is lost or seen twice in an epoch; each step's loss is ours over both ranks.

    Nine buffers on two ranks leave one rank an empty one, whose step is finite and adds nothing.
    """
    shards = open_shards(data.shards)
    evaluated = trainers.evaluation_alone(
        transformers.AutoModelForCausalLM.from_pretrained(data.dense), shards.part("eval")
    )
    for name, ranks in trainers.on_two_ranks(data.shards, data.dense, data.folder / "ranks").items():
        rows = [rank["rows"] for rank in ranks]
        assert len(rows[0]) == len(rows[1]), name
        calls = -(-len(shards) // 2)
        epoch = [row for rank in rows for call in rank[:calls] for row in call]
        assert sorted(epoch, key=str) == [*range(len(shards)), None], name
        assert [rank["arrived"] for rank in ranks] == [[EXACT], [EXACT]], name
        steps = trainers.steps_of(name, rows)
        logs = ranks[0]["logs"]
        assert len(logs) == len(steps), name
        assert trainers.apart(logs, trainers.each_alone(data.dense, shards, steps)) < FP32, name
        for loss in ranks[0]["evaluations"]:
            assert math.isclose(loss, evaluated, rel_tol=0.02), name  # other batches, so other means


@pytest.mark.parametrize("settings", [{}, {"packing": True, "max_length": 96}], ids=["defaults", "packing"])
def test_trl_with_its_defaults_or_with_packing_leaks(
    settings: dict[str, Any], trainers: ModuleType, data: Any
) -> None:
    """TRL's defaults hide the boundaries by a mask, `packing=True` replaces them; both are refused."""
    run = trainers.run_trl(data.shards, data.dense, data.folder / "leak", check=False, **settings)
    call = run.trained[0]
    lengths = trainers.lengths_of(call, open_shards(data.shards))
    assert trainers.isolation(run.model, call, lengths).others > 0.1
    with pytest.raises(OptionError, match="packing=False"):
        trainers.run_trl(data.shards, data.dense, data.folder / "leak", check=True, **settings)


def test_trl_with_a_max_length_is_refused_by_name(data: Any) -> None:
    """A `max_length` beside our collate would cut rows below their boundaries; None passes."""
    from trl import SFTConfig, SFTTrainer

    def make(max_length: int | None) -> Any:
        return SFTTrainer(
            bind(transformers.AutoModelForCausalLM.from_pretrained(data.dense)),
            SFTConfig(
                str(data.folder / "max_length"),
                max_length=max_length,
                packing=False,
                use_cpu=True,
                bf16=False,
                report_to=[],
            ),
            train_dataset=datasets.load_from_disk(str(data.shards)),
            processing_class=transformers.AutoTokenizer.from_pretrained(data.dense),
            data_collator=collate,
        )

    check_trainer(make(None))
    with pytest.raises(OptionError, match="set max_length=None"):
        check_trainer(make(512))


def test_a_bound_model_refuses_trl_s_mask(trainers: ModuleType, data: Any) -> None:
    """Where nobody called `check_trainer`, a bound model still refuses the attention mask by name."""
    from_pretrained = transformers.AutoModelForCausalLM.from_pretrained
    bound = mock.Mock(side_effect=lambda *args, **kwargs: bind(from_pretrained(*args, **kwargs)))
    with (
        mock.patch.object(transformers.AutoModelForCausalLM, "from_pretrained", bound),
        pytest.raises(KernelError, match="attention_mask was given"),
    ):
        trainers.run_trl(data.shards, data.dense, data.folder / "leak", check=False)


# Traps, one by one


@pytest.fixture(scope="module")
def make_trainer(data: Any) -> Callable[..., transformers.Trainer]:
    """A transformers.Trainer on the shards; arguments replace its own."""

    def make(*, bound: bool = True, **more: Any) -> transformers.Trainer:
        args = {
            "use_cpu": True,
            "report_to": [],
            "max_steps": 1,
            "save_strategy": "no",
            **more.pop("args", {}),
        }
        kept: dict[str, Any] = {"train_dataset": PackedDataset(data.shards), "data_collator": collate, **more}
        model = transformers.AutoModelForCausalLM.from_pretrained(data.dense)
        return transformers.Trainer(
            bind(model) if bound else model,
            transformers.TrainingArguments(str(data.folder / "trap"), **args),
            **kept,
        )

    return make


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unbound": ({"bound": False}, "its model is not bound"),
    "dispatch_batches": (
        {"args": {"accelerator_config": {"dispatch_batches": True}}},
        "dispatch_batches=True",
    ),
    "compute_metrics": ({"compute_metrics": lambda _: {}}, "gather the logits"),
    "collator": (
        {"data_collator": transformers.default_data_collator},
        "data_collator is default_data_collator",
    ),
}


@pytest.mark.parametrize(("settings", "message"), REFUSED.values(), ids=REFUSED)
def test_a_setting_that_spoils_batches_is_refused_by_name(
    settings: dict[str, Any], message: str, make_trainer: Callable[..., transformers.Trainer]
) -> None:
    """`check_trainer` names the setting and the one that is right; without it, the trainer passes."""
    check_trainer(make_trainer())
    with pytest.raises(OptionError, match=message):
        check_trainer(make_trainer(**settings))


@pytest.mark.parametrize("kind", ["PackedDataset", "load_from_disk", "Subset"])
def test_an_id_that_the_model_has_no_word_for_is_refused_by_name(
    kind: str, data: Any, make_trainer: Callable[..., transformers.Trainer]
) -> None:
    """The largest id and the embedding's rows are compared before the first step, evaluation's rows too."""
    shards = open_shards(data.shards)
    dataset = {
        "PackedDataset": lambda: PackedDataset(data.shards, multiple_of=2),
        "load_from_disk": lambda: datasets.load_from_disk(str(data.shards)),
        "Subset": lambda: torch.utils.data.Subset(PackedDataset(data.shards), range(len(shards))),
    }[kind]()
    largest = max(int(buffer.input_ids.max()) for buffer in shards)
    for name in ("train", "eval"):
        trainer = make_trainer(**{"train_dataset": None, f"{name}_dataset": dataset})
        trainer.model.resize_token_embeddings(1000)  # more than any id
        check_trainer(trainer)
        trainer.model.resize_token_embeddings(largest)
        words = rf"holds ids up to {largest}, the model has {largest} words: pack with the model's own"
        with pytest.raises(OptionError, match=words):
            check_trainer(trainer)


def test_rows_are_looked_at_as_a_trainer_gets_them(make_trainer: Callable[..., transformers.Trainer]) -> None:
    """Tensors, a whole batch without ids, what a transform makes of the columns: as `collate` takes them."""
    rows = {"input_ids": [[1, 2]], "labels": [[-100, 2]], "seq_lengths": [[2]]}

    def beyond(batch: dict[str, Any]) -> dict[str, Any]:
        return {**batch, "input_ids": [[5000, 5001] for _ in batch["input_ids"]]}

    transformed = datasets.Dataset.from_dict(rows)
    transformed.set_transform(beyond)
    features = datasets.Features({"input_ids": datasets.List(datasets.Value("int32"))})
    for dataset, largest in (
        (transformed, 5001),
        ([{key: torch.tensor(value[0]) for key, value in rows.items()}], 2),
        (datasets.Dataset.from_dict({"input_ids": [None] * 1000 + [[1, 2]]}, features=features), 2),
    ):
        trainer = make_trainer(train_dataset=dataset)
        trainer.model.resize_token_embeddings(largest)
        with pytest.raises(OptionError, match=f"train_dataset holds ids up to {largest}, the model has"):
            check_trainer(trainer)


def test_a_manifest_s_vocabulary_spares_reading_the_rows(
    tmp_path: Any, make_trainer: Callable[..., transformers.Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the model has as many words as the tokenizer of the shards, no buffer is read for it."""
    pack_dataset(CHATS, tokenizer=TOKENIZER, out=tmp_path / "shards", options=PackOptions(capacity=1024))
    trainer = make_trainer(train_dataset=PackedDataset(tmp_path / "shards"))
    words = trainer.train_dataset.shards.manifest["fingerprint"]["chat"]["vocabulary"]
    trainer.model.resize_token_embeddings(words)
    monkeypatch.setattr(PackedDataset, "__getitem__", lambda *_: pytest.fail("reads a buffer"))
    check_trainer(trainer)


def test_a_model_that_the_shards_were_not_made_for_is_refused_by_name(
    tmp_path: Any, make_trainer: Callable[..., transformers.Trainer]
) -> None:
    """As in training: many more words than the tokenizer's are another vocabulary; positions have to do."""
    pack_dataset(CHATS, tokenizer=TOKENIZER, out=tmp_path / "shards", options=PackOptions(capacity=1024))
    trainer = make_trainer(train_dataset=PackedDataset(tmp_path / "shards"))
    shards = trainer.train_dataset.shards
    trainer.model.resize_token_embeddings(shards.vocabulary + 2048)  # as models that round up
    check_trainer(trainer)
    rows = datasets.load_from_disk(str(tmp_path / "shards"))
    longest = max(length for lengths in rows["seq_lengths"] for length in lengths)  # positions restart
    assert longest < max(map(len, rows["input_ids"]))
    for whole in (PackedDataset(tmp_path / "shards"), rows):
        trainer.train_dataset = whole
        trainer.model.config.max_position_embeddings = longest
        check_trainer(trainer)
        trainer.model.config.max_position_embeddings = longest - 1
        with pytest.raises(
            OptionError, match=f"examples of {longest} tokens, the model takes {longest - 1} "
        ):
            check_trainer(trainer)
    for whole in (PackedDataset(tmp_path / "shards"), rows):
        trainer.train_dataset = torch.utils.data.ConcatDataset([torch.utils.data.Subset(whole, range(1))])
        with pytest.raises(OptionError, match=f"takes {longest - 1} positions"):
            check_trainer(trainer)
    trainer.train_dataset = PackedDataset(tmp_path / "shards")
    trainer.model.resize_token_embeddings(shards.vocabulary + 2049)
    with pytest.raises(OptionError, match=f"of {shards.vocabulary} words, the model has .* own tokenizer"):
        check_trainer(trainer)


def test_a_tail_that_would_turn_the_examples_is_refused_by_name(
    data: Any, make_trainer: Callable[..., transformers.Trainer]
) -> None:
    """Where the rotary embedding looks at a batch's longest, a data set's own tail counts, if it has one."""
    shards = open_shards(data.shards)
    longest, capacity = int(shards.seq_lengths.max()), shards.capacity
    trainer = make_trainer()
    config = trainer.model.config
    config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    for dataset, enough, found in (
        (PackedDataset(shards), capacity, f"room for a tail of {capacity} tokens"),
        (
            PackedDataset(shards, capacity=capacity + 9),
            capacity + 9,
            f"room for a tail of {capacity + 9} tok",
        ),
        (PackedDataset(shards, fixed_shape=False), longest, f"examples of {longest} tokens"),
        (datasets.load_from_disk(str(data.shards)), longest, f"examples of {longest} tokens"),
    ):
        trainer.train_dataset = dataset
        config.max_position_embeddings = enough
        check_trainer(trainer)
        config.max_position_embeddings = enough - 1
        with pytest.raises(OptionError, match=found):
            check_trainer(trainer)


def test_an_id_below_zero_is_refused_by_name(make_trainer: Callable[..., transformers.Trainer]) -> None:
    """A pad of −1 that a data set of one's own left in the ids: named, before the model's own IndexError."""
    rows = datasets.Dataset.from_dict({"input_ids": [[3, -1, 4]], "labels": [[3, 3, 4]]})
    with pytest.raises(OptionError, match="train_dataset holds token id -1"):
        check_trainer(make_trainer(train_dataset=rows))


def test_a_stream_is_not_read_to_its_end(make_trainer: Callable[..., transformers.Trainer]) -> None:
    """A data set without a length, which may never end, is left unread; what can be asked of it holds."""

    def endless() -> Iterator[Any]:
        pytest.fail("reads the stream")
        yield

    streams = datasets.IterableDataset.from_generator(endless), _Stream()
    for stream in streams:
        check_trainer(make_trainer(train_dataset=stream, args={"max_steps": 1}))


class _Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        pytest.fail("reads the stream")


def test_settings_that_spoil_two_ranks_are_refused_by_name(
    data: Any, make_trainer: Callable[..., transformers.Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On two ranks: buffers shown twice, means of means, and processes that know nothing of each other."""
    even = {"train_dataset": PackedDataset(data.shards, multiple_of=2 * 8)}  # 8 is Trainer's own batch size
    odd, right = make_trainer(), make_trainer(**even)
    means = make_trainer(args={"average_tokens_across_devices": False}, **even)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(OptionError, match="2 processes were started, but its world size is 1"):
        check_trainer(right)
    monkeypatch.setattr(transformers.TrainingArguments, "world_size", 2)
    check_trainer(right)
    with pytest.raises(
        OptionError, match=r"9 rows in train_dataset .* show 7 of them twice \(even_batches\)"
    ):
        check_trainer(odd)
    with pytest.raises(OptionError, match="average_tokens_across_devices=False"):
        check_trainer(means)


def test_data_parallel_is_refused_by_name(
    make_trainer: Callable[..., transformers.Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several GPUs in one process would cut a batch apart."""
    trainer = make_trainer()
    monkeypatch.setattr(transformers.TrainingArguments, "n_gpu", 2)
    with pytest.raises(OptionError, match="DataParallel"):
        check_trainer(trainer)


def test_empty_rows_in_trl_s_evaluation_are_refused_by_name(
    data: Any, monkeypatch: pytest.MonkeyPatch, make_trainer: Callable[..., transformers.Trainer]
) -> None:
    """TRL would count an empty row as a loss of 0: it gets the rows as they are."""
    rows = datasets.load_from_disk(str(data.shards / "eval"))
    trainer = make_trainer(train_dataset=PackedDataset(data.shards, multiple_of=16))
    monkeypatch.setattr("packing.trainers._is_trl", lambda _: True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(transformers.TrainingArguments, "world_size", 2)
    trainer.eval_dataset = rows
    check_trainer(trainer)
    trainer.eval_dataset = whole_steps(rows, multiple_of=2)
    with pytest.raises(OptionError, match="eval_dataset has empty rows"):
        check_trainer(trainer)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_data_set_without_a_row_is_refused_by_name(
    ranks: int,
    data: Any,
    monkeypatch: pytest.MonkeyPatch,
    make_trainer: Callable[..., transformers.Trainer],
) -> None:
    """To train on or one of several to evaluate on, of datasets or of torch, in TRL too: one line."""
    right = PackedDataset(data.shards, multiple_of=16)
    rows = datasets.load_from_disk(str(data.shards))
    trainer, trl = make_trainer(train_dataset=right), make_trainer(train_dataset=right)
    monkeypatch.setattr("packing.trainers._is_trl", lambda trainer: trainer is trl)
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setattr(transformers.TrainingArguments, "world_size", ranks)
    for empty in (rows.select([]), torch.utils.data.Subset(right, []), []):
        for one in (trainer, trl):
            for name, value in (("train", empty), ("eval", empty), ("eval", {"none": empty, "some": right})):
                one.train_dataset, one.eval_dataset = right, None
                setattr(one, f"{name}_dataset", value)
                with pytest.raises(OptionError, match=f"{name}_dataset has no row"):
                    check_trainer(one)


def test_rows_without_ids_are_refused_by_name(
    data: Any, make_trainer: Callable[..., transformers.Trainer]
) -> None:
    """What a row has is said; of datasets or of a list alike."""
    right = PackedDataset(data.shards, multiple_of=16)
    trainer = make_trainer(train_dataset=right)
    trainer.eval_dataset = [right.shards[0]]
    check_trainer(trainer)
    for rows in (datasets.Dataset.from_dict({"text": ["a"]}), [{"text": "a"}]):
        trainer.eval_dataset = rows
        with pytest.raises(OptionError, match="eval_dataset has no input_ids, only text"):
            check_trainer(trainer)


def test_trl_s_evaluation_is_looked_at_whatever_its_rows_are(
    data: Any, monkeypatch: pytest.MonkeyPatch, make_trainer: Callable[..., transformers.Trainer]
) -> None:
    """Rows without labels, of which TRL trains every token, pass; an empty buffer of a PackedDataset not."""
    rows = datasets.load_from_disk(str(data.shards / "eval")).remove_columns("labels")
    trainer = make_trainer(train_dataset=PackedDataset(data.shards, multiple_of=16), eval_dataset=rows)
    monkeypatch.setattr("packing.trainers._is_trl", lambda _: True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(transformers.TrainingArguments, "world_size", 2)
    check_trainer(trainer)
    trainer.eval_dataset = PackedDataset(data.shards, multiple_of=2)
    with pytest.raises(OptionError, match="eval_dataset has empty rows"):
        check_trainer(trainer)


def test_a_dropped_column_is_refused_by_name(
    data: Any, make_trainer: Callable[..., transformers.Trainer]
) -> None:
    """Trainer drops columns that the model does not take; without seq_lengths there is no batch."""
    trainer = make_trainer(train_dataset=datasets.load_from_disk(str(data.shards)))
    with pytest.raises(OptionError, match="remove_unused_columns=False"):
        trainer.train()


def test_a_batch_counts_as_one_row(data: Any) -> None:
    """Accelerate reads a batch's size from its first tensor: that is input_ids, one row."""
    dataset = PackedDataset(data.shards)
    assert find_batch_size(collate([dataset[0], dataset[1]])) == 1


def test_a_prepared_loader_hands_batches_on_as_they_are(data: Any) -> None:
    """`accelerator.prepare(DataLoader(PackedDataset, collate_fn=collate))` changes nothing in a batch."""
    dataset = PackedDataset(data.shards)
    loader = Accelerator(cpu=True).prepare(DataLoader(dataset, batch_size=2, collate_fn=collate))
    for batch, first in zip(loader, range(0, len(dataset), 2), strict=True):
        check_batch(batch)
        expected = collate([dataset[number] for number in range(first, min(first + 2, len(dataset)))])
        assert all(
            torch.equal(torch.as_tensor(batch[key]), torch.as_tensor(expected[key])) for key in expected
        )


def test_an_empty_buffer_has_no_mean_but_a_sum(data: Any) -> None:
    """The stock loss of an all-tail buffer is NaN as a mean, and 0 as a sum over the step's tokens."""
    model = transformers.AutoModelForCausalLM.from_pretrained(data.dense)
    dataset = PackedDataset(data.shards, multiple_of=2)
    batch = collate([dataset[len(dataset) - 1]])
    assert (batch["labels"] == -100).all()
    assert model(**batch).loss.isnan()
    loss = model(**batch, num_items_in_batch=7).loss
    loss.backward()
    assert loss == 0.0
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_whole_steps_adds_only_what_is_missing(data: Any) -> None:
    """Rows that train nothing fill up to the multiple; a data set that fits is left as it is."""
    rows = datasets.load_from_disk(str(data.shards))
    filled = whole_steps(rows, multiple_of=4)
    assert len(filled) == 12
    assert filled.select(range(9)).to_list() == rows.to_list()
    assert all(
        set(row["labels"]) == {-100} and sum(row["seq_lengths"]) == 2 for row in filled.select([9, 10, 11])
    )
    assert whole_steps(rows, multiple_of=3) is rows
    check_batch(collate([filled[8], filled[9]]))


def test_check_trainer_knows_parallelism_that_cuts_sequences() -> None:
    """Context and sequence parallelism are refused by name."""
    trainer = SimpleNamespace(
        args=SimpleNamespace(
            world_size=1, n_gpu=1, accelerator_config=SimpleNamespace(dispatch_batches=None)
        ),
        data_collator=collate,
        accelerator=SimpleNamespace(parallelism_config=SimpleNamespace(cp_enabled=True, sp_enabled=False)),
    )
    with pytest.raises(OptionError, match="cut sequences apart"):
        check_trainer(trainer)


@pytest.mark.parametrize("given", ["out", None, transformers.Trainer], ids=repr)
def test_what_is_no_trainer_is_refused_by_name(given: object) -> None:
    """A folder, nothing or the class: a typed error that says what was given."""
    with pytest.raises(
        OptionError, match=rf"takes a transformers.Trainer .*, not the {type(given).__name__} "
    ):
        check_trainer(given)
