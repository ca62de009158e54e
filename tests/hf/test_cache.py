"""Caches passed in, returned, copied, cropped, reordered, saved: always equal to computing the text afresh."""

from __future__ import annotations

import copy
import gc
import pickle
import threading

import pytest
import torch
from tests.hf.comparing import same_tokens

from llamaherd.errors import (
    OutOfCellsError,
    OutOfSequencesError,
    RequestError,
    StateMismatchError,
    UnsupportedError,
)
from llamaherd.hf import LlamaCppCache

OPTIONS = {"max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 319}


def close(a, b, limit=1e-3):
    assert a.shape == b.shape
    assert (a - b).abs().max() < limit


@pytest.fixture
def ids(prompts):
    return torch.tensor([prompts[5]])


def test_multi_turn_equals_the_whole_text(pair, prompts):
    equal = 0
    for prompt in prompts[::2]:
        rows = []
        for model in pair.models:
            out = model.generate(torch.tensor([prompt]), **OPTIONS, return_dict_in_generate=True)
            for turn in ([91, 92, 93], [94, 95]):
                text = torch.cat([out.sequences, torch.tensor([turn])], 1)
                out = model.generate(text, cache=out.cache, **OPTIONS, return_dict_in_generate=True)
            rows.append(out.sequences)
        equal += same_tokens(rows[0][0], rows[1][0], pair.models)
    assert equal == 5


def test_the_old_name_works_without_a_warning(pair, ids):
    out = pair.ours.generate(ids, **OPTIONS, return_dict_in_generate=True)
    text = torch.cat([out.sequences, torch.tensor([[91, 92]])], 1)
    again = pair.ours.generate(text, past_key_values=out.cache, **OPTIONS)
    assert torch.equal(again, pair.ours.generate(text, **OPTIONS))


def test_batched_multi_turn_keeps_the_padding(pair, batch):
    rows = []
    for model in pair.models:
        out = model.generate(**batch, **OPTIONS, return_dict_in_generate=True)
        text = torch.cat([out.sequences, torch.full((10, 2), 91)], 1)
        mask = torch.cat([batch["attention_mask"], torch.ones(10, text.shape[1] - 40, dtype=torch.long)], 1)
        rows.append(model.generate(text, attention_mask=mask, cache=out.cache, **OPTIONS))
    assert torch.equal(rows[0], rows[1])


def test_rows_that_ended_early_go_on_as_in_torch(pair, batch):
    """generate() pads a finished row; in the next turn those columns are masked."""
    inputs = {k: v[:6] for k, v in batch.items()}
    options = {"max_new_tokens": 12, "pad_token_id": 319, "return_dict_in_generate": True}
    first = pair.theirs.generate(**inputs, eos_token_id=None, **options).sequences[:, 40:]
    ends = sorted({int(first[1, 3]), int(first[3, 6])})
    rows = []
    for model in pair.models:
        out = model.generate(**inputs, eos_token_id=ends, **options)
        new = (out.sequences[:, 40:] != 319).long()
        text = torch.cat([out.sequences, torch.full((6, 2), 91)], 1)
        mask = torch.cat([inputs["attention_mask"], new, torch.ones(6, 2, dtype=torch.long)], 1)
        assert (new == 0).any()
        rows.append(
            model.generate(text, attention_mask=mask, cache=out.cache, **options, eos_token_id=None).sequences
        )
    assert torch.equal(rows[0], rows[1])


def test_a_deep_copy_serves_many_questions_and_shares_its_cells(pair, ids):
    memory = pair.ours.runtime.context.memory
    prefix = pair.ours(ids).cache
    used = memory.used_cells
    copies = [copy.deepcopy(prefix) for _ in range(5)]
    assert memory.used_cells == used
    for i, one in enumerate(copies):
        text = torch.cat([ids, torch.tensor([[40 + i, 50 + i]])], 1)
        assert torch.equal(
            pair.ours.generate(text, cache=one, **OPTIONS), pair.theirs.generate(text, **OPTIONS)
        )
    assert prefix.get_seq_length() == ids.shape[1]
    close(
        pair.ours(torch.tensor([[77]]), cache=prefix).logits[:, -1],
        pair.theirs(torch.cat([ids, torch.tensor([[77]])], 1)).logits[:, -1],
    )


def test_crop_and_go_on(pair, batch):
    whole = pair.ours(**batch).cache
    whole.crop(0)
    whole.crop(-3)
    assert whole.get_seq_length() == 37
    tail = torch.randint(10, 250, (10, 4))
    ids = torch.cat([batch["input_ids"][:, :37], tail], 1)
    mask = torch.cat([batch["attention_mask"][:, :37], torch.ones(10, 4)], 1)
    rows = mask[:, :37].sum(1) > 0  # the shortest prompts are gone
    logits = pair.ours(tail, attention_mask=mask, cache=whole).logits
    close(logits[rows], pair.ours(ids, attention_mask=mask).logits[rows][:, -4:])
    with pytest.raises(ValueError, match="negative"):
        whole.crop(3)


def test_repeat_select_and_reorder(pair, prompts):
    ids = torch.tensor([prompts[4], prompts[4][::-1]])
    cache = pair.ours(ids).cache
    cache.batch_repeat_interleave(3)
    cache.batch_select_indices(torch.tensor([5, 0, 0, 4]))
    cache.reorder_cache(torch.tensor([3, 1, 1, 0]))
    cache.batch_select_indices(torch.tensor([True, True, False, True]))
    rows = [1, 0, 1]
    new = torch.tensor([[50], [60], [70]])
    ours = pair.ours(new, cache=cache).logits
    theirs = pair.theirs(torch.cat([ids[rows], new], 1)).logits[:, -1:]
    close(ours, theirs.detach())
    with pytest.raises(RequestError, match="rows"):
        cache.batch_select_indices(torch.tensor([3]))


def test_one_row_serves_a_batch(pair, ids):
    cache = pair.ours(ids).cache
    new = torch.tensor([[50, 51], [60, 61], [70, 71]])
    ours = pair.ours(new, cache=cache).logits
    close(ours, pair.theirs(torch.cat([ids.expand(3, -1), new], 1)).logits[:, -2:].detach())
    prefix = pair.ours(ids).cache
    text = torch.cat([ids, torch.tensor([[50, 51]])], 1)
    assert torch.equal(
        pair.ours.generate(text, cache=prefix, num_beams=4, **OPTIONS),
        pair.theirs.generate(text, num_beams=4, **OPTIONS),
    )


def test_save_and_load(pair, batch, tmp_path):
    cache = pair.ours(**batch).cache
    cache.save(tmp_path / "cache.bin")
    loaded = LlamaCppCache.load(pair.ours, tmp_path / "cache.bin")
    assert torch.equal(loaded.mask, cache.mask)
    new = torch.randint(10, 250, (10, 2))
    close(pair.ours(new, cache=loaded).logits, pair.ours(new, cache=cache).logits, 1e-5)


def test_broken_and_foreign_files_are_refused(pair, pairs, ids, tmp_path):
    path = tmp_path / "cache.bin"
    pair.ours(ids).cache.save(path)
    data = path.read_bytes()
    gc.collect()
    pair.ours.runtime.collect()
    free = pair.ours.runtime.context.memory.free_sequences
    with pytest.raises(StateMismatchError, match="architecture"):
        LlamaCppCache.load(pairs("qwen2").ours, path)
    for broken in (
        b"",
        data[:20],
        data[:-1],
        data + b"x",
        data[:-9] + b"x" + data[-8:],
        b"LHCACHE1" + b"\xff" * 40,
    ):
        path.write_bytes(broken)
        with pytest.raises(StateMismatchError):
            LlamaCppCache.load(pair.ours, path)
    gc.collect()
    pair.ours.runtime.collect()
    assert pair.ours.runtime.context.memory.free_sequences == free
    with pytest.raises(StateMismatchError, match="cannot be read"):
        LlamaCppCache.load(pair.ours, tmp_path / "none.bin")


def test_sequences_are_free_when_the_cache_is_collected(pair, batch):
    gc.collect()
    pair.ours.runtime.collect()
    memory = pair.ours.runtime.context.memory
    free, cells = memory.free_sequences, memory.free_cells
    cache = pair.ours(**batch).cache
    assert memory.free_sequences == free - 10
    ring = [cache]
    ring.append(ring)  # only the collector finds it
    del cache, ring
    gc.collect()
    pair.ours.runtime.collect()
    assert (memory.free_sequences, memory.free_cells) == (free, cells)


def test_reset_empties_and_serves_again(pair, ids):
    cache = pair.ours(ids).cache
    cache.reset()
    assert (cache.get_seq_length(), cache.batch_size, cache.is_initialized) == (0, -1, False)
    close(pair.ours(ids, cache=cache).logits, pair.ours(ids).logits, 1e-5)


def test_aliasing_and_pickling_are_refused(pair, ids):
    cache = pair.ours(ids).cache
    with pytest.raises(UnsupportedError, match="deepcopy"):
        copy.copy(cache)
    with pytest.raises(UnsupportedError, match="save"):
        pickle.dumps(cache)
    with pytest.raises(UnsupportedError, match="torch"):
        cache.update(None, None, 0)


def test_running_out_names_the_limit_and_the_users_and_changes_nothing(fresh):
    model = fresh(n_seq_max=4, n_ctx=256)
    ids = torch.randint(10, 250, (3, 20))
    held = model(ids).cache
    with pytest.raises(OutOfSequencesError, match=r"n_seq_max.*3 rows x 20 tokens") as caught:
        model.generate(ids[:1], num_beams=4, max_new_tokens=3, eos_token_id=None)
    assert caught.value.limit == 4
    with pytest.raises(OutOfSequencesError):
        copy.deepcopy(held)
    with pytest.raises(OutOfSequencesError):
        held.batch_repeat_interleave(2)
    assert held.batch_size == 3
    with pytest.raises(OutOfCellsError, match=r"n_ctx.*3 rows x 20 tokens"):
        model(torch.randint(10, 250, (1, 210)))
    with pytest.raises(OutOfCellsError, match="n_ctx"):
        model(torch.randint(10, 250, (3, 100)), cache=held)
    assert held.get_seq_length() == 20
    new = torch.randint(10, 250, (3, 2))
    alone = model(torch.cat([ids[:1], new[:1]], 1)).logits[:, -2:]
    close(model(new, cache=held).logits[:1], alone)


def test_many_threads_share_one_model(pair, prompts):
    wanted = [pair.ours.generate(torch.tensor([p]), **OPTIONS) for p in prompts]
    found = [None] * len(prompts)

    def run(i):
        for _ in range(3):
            found[i] = pair.ours.generate(torch.tensor([prompts[i]]), **OPTIONS)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_layer_outputs_switched_on_keeps_live_caches(fresh, prompts):
    model = fresh()
    ids = torch.tensor([prompts[6], prompts[6][::-1]])
    cache = model(ids).cache
    before = model.runtime.context
    hidden = model(ids, output_hidden_states=True).hidden_states
    assert model.runtime.context is not before
    assert len(hidden) == 3
    new = torch.tensor([[50], [60]])
    close(model(new, cache=cache).logits, model(torch.cat([ids, new], 1)).logits[:, -1:])
