"""What a server does while nobody asks it anything."""

from pathlib import Path

from .serving import started_server, wait_until


def test_the_first_grammar_finds_its_process_started(tiny_model: Path, tmp_path: Path) -> None:
    with started_server(tiny_model, tmp_path / "log") as server:
        engine = server.engine_pid()
        wait_until(lambda: bool(server.children_of(engine)), 30)
        assert server.complete(prompt="ban", guided_regex="[0-9]{3}")["choices"][0][
            "text"
        ].isdigit()
