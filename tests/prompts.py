"""Fixed texts in three languages, for tests with the real models."""

from pathlib import Path

_LICENCE = (Path(__file__).parent.parent / "LICENSE").read_text()
ENGLISH = _LICENCE + "\n\n".join(reversed(_LICENCE.split("\n\n")))

_FUNCTION = '''
def tile_{n}(width: int, height: int = {n}) -> list[tuple[int, int]]:
    """Return the corners of a {n}-sided tile, counted from the left."""
    corners = [(x * {n}, y) for x in range(width) for y in range(height) if (x + y) % {m} != 0]
    if not corners:
        raise ValueError(f"no corner in {{width}} x {{height}}")
    return sorted(corners, key=lambda corner: corner[1] - {m} * corner[0])
'''
CODE = "import math\n" + "".join(_FUNCTION.format(n=n, m=n % 5 + 2) for n in range(3, 40))

_SENTENCES = (
    "東京の朝は静かで、川の上に白い霧が立っていた。",
    "図書館の前で{n}人の学生が数学の問題について話している。",
    "五つの形のタイルは、すき間なく平面をおおうことができます。",
    "彼女は{n}時に駅で友だちに会い、いっしょに山へ行きました。",
    "記憶の使い方を先に決めれば、あとで困ることはありません!",
)
JAPANESE = "".join(_SENTENCES[n % 5].format(n=n) for n in range(200))

TEXTS = {"english": ENGLISH, "code": CODE, "japanese": JAPANESE}


def prompt_ids(encode, language: str, num_tokens: int, start: int = 0) -> list[int]:
    """Return exactly `num_tokens` token ids of a text, from its token `start` on; `encode` maps text to ids."""
    ids = encode(TEXTS[language])[start : start + num_tokens]
    assert len(ids) == num_tokens, f"{language} is too short for {num_tokens} tokens from {start} on"
    return ids
