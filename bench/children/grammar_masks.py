"""``grammar_masks TOKENIZER_FOLDER``: what the masks of answers take that are held to a schema.

One question is a schema and an answer that it allows; the answer tells how long each mask took, and how long
it took to make the token table and the matcher.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from bench.harness.child import serve


def main(folder: Path) -> None:
    from mlx_lm.tokenizer_utils import load as load_tokenizer

    from fleetd.engine.grammar.answer_grammar import AnswerForm
    from fleetd.engine.grammar.grammars import Grammars
    from fleetd.engine.sampling.constraint import Constraint

    tokenizer = load_tokenizer(folder)
    grammars = Grammars(tokenizer, len(tokenizer.get_vocab()))
    begun = time.perf_counter()
    table = grammars.table
    table_s = time.perf_counter() - begun

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        constraint = Constraint("json_schema", json.dumps(question["schema"]), "schema")
        begun = time.perf_counter()
        form = AnswerForm(constraint, (), must_call=False, parallel=False, begins="content")
        matcher = grammars.matcher(form, chat=False)
        compile_s = time.perf_counter() - begun
        each_s = []
        for token in tokenizer.encode(json.dumps(question["answer"]), add_special_tokens=False):
            begun = time.perf_counter()
            mask = matcher.masks()[0]
            each_s.append(time.perf_counter() - begun)
            if not mask[token]:
                raise ValueError(f"the schema does not allow {tokenizer.decode([token])!r} here")
            matcher.consume([token])
        return {"each_s": each_s, "compile_s": compile_s, "table_s": table_s, "tokens": len(table)}

    serve(answer)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
