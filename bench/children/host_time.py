"""Decoding with a model whose compute is next to nothing: what is left is the host's time for each token.

stream_generate    mlx-lm's own loop, one answer after the other
BatchGenerator     mlx-lm's own loop for several answers
fleetd             the engine's scheduler, whose reports go through a socket to another process, as a worker's

On a CPU the model runs as MLX is installed, without ``fleetd/engine/cpu/products.py``: then MLX's own thread
computes while Python goes on, as a GPU does. ``cured`` measures the CPU path that fleetd ships, which
computes within the graph's construction.
"""

from __future__ import annotations

import itertools
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.harness.child import serve
from fleetd.engine.cpu import products

LAYERS, WIDTH, HEADS = 2, 64, 2
STREAMS = 4
SEED = 1


@dataclass(frozen=True, slots=True)
class Step:
    """The ``tokens`` that a step gave, when it was over, and what this thread had computed by then."""

    tokens: int
    at_s: float = field(default_factory=time.perf_counter)
    host_s: float = field(default_factory=time.thread_time)


def main(mode: str, model_path: Path, vocabulary: int) -> None:
    products.preload_blas()
    # mlx binds to the BLAS that is loaded first, so it is imported only now.
    from fleetd.engine.cpu import mlx_functions
    from fleetd.engine.load import model_reading
    from fleetd.engine.worker import quiet_libraries

    quiet_libraries()
    import mlx.core as mx
    from mlx_lm.tokenizer_utils import load as load_tokenizer

    device = model_reading.pick_device("auto")
    if device == "cpu":
        mlx_functions.install() if mode == "cured" else mx.disable_compile()
    sides = _Sides(_model(vocabulary), load_tokenizer(model_path), vocabulary, ahead=mode != "cured")
    serve(sides.answer)


def _model(vocabulary: int) -> Any:
    import mlx.core as mx
    from mlx_lm.models import llama

    mx.random.seed(SEED)
    model = llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=WIDTH,
            num_hidden_layers=LAYERS,
            intermediate_size=2 * WIDTH,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            rms_norm_eps=1e-5,
            vocab_size=vocabulary,
            tie_word_embeddings=False,
        )
    )
    # Each token is followed by the next id, nearly always when sampled, too: nothing repeats, so nothing can
    # be drafted.
    following = mx.roll(model.model.embed_tokens.weight, 1, axis=0)  # type: ignore[call-arg]  # a gap in its stubs
    model.lm_head.weight = 4 * following
    for layer in model.layers:
        for last in (layer.self_attn.o_proj, layer.mlp.down_proj):
            last.weight = last.weight * 0
    mx.eval(model.parameters())
    return model


class _Sides:
    """Both programs over one model. No answer ends by itself: the tokenizer's end tokens are taken away."""

    def __init__(self, model: Any, tokenizer: Any, vocabulary: int, *, ahead: bool) -> None:
        from fleetd.engine.grammar.token_table import TokenTable

        self._model, self._tokenizer, self._vocabulary, self._ahead = model, tokenizer, vocabulary, ahead
        # Answers can be held to a grammar if the model has the tokenizer's vocabulary.
        whole = vocabulary >= len(tokenizer.get_vocab())
        self._table = TokenTable(tokenizer, vocabulary, []) if whole else None
        tokenizer.eos_token_ids = set()
        self._drafted = 0

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """Seconds per token of the median step: one that was held up says more about the machine. And what
        Python's own thread computed of them: with MLX's threads beside it, that is the host's part."""
        prompts: list[list[int]] = question["prompts"]
        tokens, temperature = question["max_tokens"], question["temperature"]
        self._drafted = 0
        match question["side"]:
            case "fleetd":
                held = question.get("held", False)
                steps = self._fleetd(prompts, tokens, temperature, drafts=question["drafts"], held=held)
            case "stream_generate":
                del prompts[1:]
                steps = self._stream_generate(prompts[0], tokens, temperature)
            case _:
                steps = self._batch_generator(prompts, tokens, temperature)
        whole = [(before, now) for before, now in itertools.pairwise(steps) if now.tokens == len(prompts)]
        return {
            "each_s": statistics.median((now.at_s - before.at_s) / now.tokens for before, now in whole),
            "host_s": statistics.median((now.host_s - before.host_s) / now.tokens for before, now in whole),
            "drafted": self._drafted,
        }

    def _stream_generate(self, prompt: list[int], tokens: int, temperature: float) -> list[Step]:
        from mlx_lm import stream_generate
        from mlx_lm.sample_utils import make_sampler

        sampler = make_sampler(temp=temperature)
        found = stream_generate(self._model, self._tokenizer, prompt, max_tokens=tokens, sampler=sampler)
        return [Step(1) for _ in found]

    def _batch_generator(self, prompts: list[list[int]], tokens: int, temperature: float) -> list[Step]:
        import mlx.core as mx
        from mlx_lm.generate import BatchGenerator
        from mlx_lm.sample_utils import make_sampler

        sampler = make_sampler(temp=temperature)
        generator = BatchGenerator(
            self._model, sampler=sampler, stream=mx.default_stream(mx.default_device())
        )
        texts = {}
        for uid in generator.insert(prompts, [tokens] * len(prompts)):
            texts[uid] = self._tokenizer.detokenizer
        steps: list[Step] = []
        for _ in range(tokens):
            # The first one also computes the prompts.
            responses = generator.next()[1] or generator.next()[1]
            for response in responses:
                texts[response.uid].add_token(response.token)
                _ = texts[response.uid].last_segment
            steps.append(Step(len(responses)))
        generator.close()
        return steps

    def _fleetd(
        self, prompts: list[list[int]], tokens: int, temperature: float, *, drafts: bool, held: bool
    ) -> list[Step]:
        from fleetd.engine.loop.scheduler import Scheduler
        from fleetd.engine.measure.chunk_size import FixedChunks
        from fleetd.engine.measure.memory import KvBudget
        from fleetd.engine.prefixes.prefix_cache import PrefixCache
        from fleetd.engine.prompt.prompt_encoding import PreparedPrompt
        from fleetd.engine.protocol import Finished, Generate, Report, Sampling, TokenPrompt
        from fleetd.engine.sequence_state.kinds import ANY
        from fleetd.engine.speculation.exactness_probe import ExactnessVerdict
        from fleetd.engine.speculation.speculation import WorkerSpeculation
        from fleetd.engine.worker import DaemonSocket

        ours, theirs = socket.socketpair()
        # The daemon is another process, too: a thread here would take turns with the one that is measured.
        reader = subprocess.Popen(["/bin/cat"], stdin=theirs.fileno(), stdout=subprocess.DEVNULL)
        link = DaemonSocket(ours.detach())
        steps: list[Step] = []
        finished: list[Finished] = []

        def emit(report: Report) -> None:
            finished.extend([report] if isinstance(report, Finished) else [])
            link.send(report)

        verdict = ExactnessVerdict(16, ANY, "exact: to be measured", {1: 1.0, 16: 1.5})
        scheduler = Scheduler(
            model=self._model,
            tokenizer=self._tokenizer,
            context_tokens=8192,
            chunks=FixedChunks(2048, 2048),
            max_streams=STREAMS,
            budget=KvBudget.of(4 << 30, 1024),
            prefix=PrefixCache(0),
            emit=emit,
            speculation=WorkerSpeculation(verdict, self._vocabulary, computes_ahead=self._ahead)
            if drafts
            else None,
        )
        for i, prompt in enumerate(prompts):
            request = Generate(
                str(i),
                TokenPrompt(prompt),
                Sampling(temperature=temperature, seed=SEED + i),
                max_tokens=tokens,
            )
            matcher = self._any_text() if held else None
            scheduler.inbox.put(PreparedPrompt(request, prompt, matcher=matcher))
        while len(finished) < len(prompts):
            scheduler.turn()
            scheduler.heartbeat()
            # In the turns before the last one each answer gets a token.
            steps.append(Step(len(scheduler.decoding)))
        scheduler.decoding.close()
        link.flush()
        with theirs:
            theirs.shutdown(socket.SHUT_RDWR)
        reader.wait()
        self._drafted = sum(one.speculation.drafted for one in finished if one.speculation)
        return steps

    def _any_text(self) -> Any:
        """What holds an answer to text without control tokens."""
        from llguidance import LLMatcher

        from fleetd.engine.grammar.matcher import AnswerMatcher

        if self._table is None:
            raise ValueError("this vocabulary is not the tokenizer's")
        return AnswerMatcher(LLMatcher(self._table.llg, "start: /(?s:.*)/"), len(self._table))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
