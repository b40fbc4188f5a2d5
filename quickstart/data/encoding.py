"""Which encoding a file is in when it is not UTF-8, so that the message can name it and the way to convert.

Not here: any conversion. A guessed conversion that is wrong would train on garbage without an error.
"""

from __future__ import annotations

import codecs
from pathlib import Path

from quickstart.errors import Fault

SAMPLE_BYTES = 1 << 16
UTF8_BOM = codecs.BOM_UTF8
# Longest first: UTF-32's little-endian mark begins with UTF-16's.
WIDE_BOMS = (
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)
# Names as iconv and Python both know them, the ones met most in text data.
# Of equals the first is taken: Korean text looks like common Chinese, but Chinese text of some length not like Korean.
CANDIDATES = ("EUC-KR", "GB18030", "BIG5", "SHIFT_JIS", "CP1252")
KOREAN_LENGTH = 10  # characters
CONFIDENT = 0.75  # share of the non-ASCII characters that must be common ones


def wide_encoding(head: bytes) -> str | None:
    """UTF-16 or UTF-32 by its mark, or by the zero bytes that ASCII text leaves in it; None for anything else."""
    for mark, name in WIDE_BOMS:
        if head.startswith(mark):
            return name
    even, odd = head[::2].count(0), head[1::2].count(0)
    half = len(head) // 2
    if half >= 4 and max(even, odd) > 0.3 * half and min(even, odd) < 0.05 * half:
        return "UTF-16LE" if odd > even else "UTF-16BE"
    return None


def mostly_utf8(raw: bytes) -> bool:
    """Whether bytes that do not decode as UTF-8 are UTF-8 all the same, with a few damaged ones."""
    text = raw.decode("utf-8", errors="replace")
    broken = text.count("\ufffd")
    return sum(ord(char) > 127 for char in text) - broken >= 3 * broken


def guess(sample: bytes) -> str | None:
    """The legacy encoding in which most of the sample's characters are common ones; None when none fits."""
    scores = {name: _score(sample, name) for name in CANDIDATES}
    best = max(CANDIDATES, key=lambda name: scores[name])
    return best if scores[best] >= CONFIDENT else None


def _score(sample: bytes, name: str) -> float:
    """Share of common characters among the non-ASCII ones; 0 where the bytes are not legal in this encoding."""
    decoder = codecs.getincrementaldecoder(name)()
    try:
        text = decoder.decode(sample)  # incremental: the sample may end within a character
    except UnicodeDecodeError:
        return 0.0
    foreign = [char for char in text if ord(char) > 127]
    if name == "EUC-KR" and len(foreign) < KOREAN_LENGTH:
        return 0.0
    return sum(_is_common(char, name) for char in foreign) / len(foreign) if foreign else 0.0


def _is_common(char: str, name: str) -> bool:
    """Whether a character is one that ordinary text in this encoding is made of."""
    if name == "CP1252":
        return char.isalpha() or char in "«»“”‘’–—…€£°·"
    try:
        code = char.encode({"GB18030": "gb2312"}.get(name, name))
    except UnicodeEncodeError:
        return False
    lead = code[0]
    if name == "GB18030":  # GB 2312: rows 1-3 punctuation, rows 16-55 the 3,755 most used characters
        return 0xA1 <= lead <= 0xA3 or 0xB0 <= lead <= 0xD7
    if name == "BIG5":  # A1-A3 punctuation, A4-C6 the 5,401 most used characters
        return 0xA1 <= lead <= 0xC6
    if name == "SHIFT_JIS":  # kana and punctuation are most of Japanese text; half-width kana are rare
        return 0x81 <= lead <= 0x83 or 0x88 <= lead <= 0x97
    return 0xB0 <= lead <= 0xC8 or lead == 0xA1  # EUC-KR: hangul syllables


def not_utf8(path: Path, name: str, line: int, sample: bytes) -> Fault:
    """The fault for a file that is not UTF-8, with the command that makes it so.

    Args:
        path: the file on disk. name: its name as the user wrote it.
        line: where the first illegal byte is, 1-based.
        sample: bytes around it.
    """
    found = wide_encoding(sample) or guess(sample)
    looks = f"bytes that look like {found}" if found else "bytes of an encoding that was not recognised"
    source = found or "ENCODING"
    converted = path.name.removesuffix(".gz")
    reader = f"zcat {path}" if path.name.lower().endswith(".gz") else f"cat {path}"
    fix = f"convert it: {reader} | iconv -f {source} -t UTF-8 > utf8_{converted}"
    return Fault(field=f"{name}:{line}", found=looks, rule="text files must be UTF-8", fix=fix)
