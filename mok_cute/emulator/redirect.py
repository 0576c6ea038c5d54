"""Makes an object file of compiled host code call our library where it would call the vendor's.

The dynamic linker looks symbols up in the order in which a process has opened its libraries, and a process that has run
kernels of the DSL has opened the vendor's. So that it does not matter who came first, our functions have names of their
own, ``own_name`` of the vendor's, and each object file is changed to ask for them before it is linked. Object
files for a real GPU are left alone, so both kinds work in one process.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

OWN_PREFIX = "virtual_"
SECTION = struct.Struct("<IIQQQQIIQQ")  # of a 64-bit ELF file: name, type, flags, address, offset, size, link, ...
SYMBOL = struct.Struct("<IBBHQQ")  # name, info, other, section, value, size
SECTIONS_AT, SECTION_COUNTS_AT = 0x28, 0x3A  # in the file header: offset of the section headers; their size and number
SYMBOL_TABLE, UNDEFINED = 2, 0


def own_name(vendor_name: str) -> str:
    return OWN_PREFIX + vendor_name.lstrip("_")


def redirect(object_file: bytes, is_ours: Callable[[str], bool]) -> bytes:
    """The object file with every undefined symbol that ``is_ours`` knows by its new name renamed."""
    assert object_file[:6] == b"\x7fELF\x02\x01", "host code is a little-endian 64-bit ELF object"
    changed = bytearray(object_file)
    (first_section,) = struct.unpack_from("<Q", changed, SECTIONS_AT)
    entry_bytes, count = struct.unpack_from("<HH", changed, SECTION_COUNTS_AT)
    sections = [list(SECTION.unpack_from(changed, first_section + i * entry_bytes)) for i in range(count)]
    for section in [section for section in sections if section[1] == SYMBOL_TABLE]:
        offset, size, link = section[4:7]
        names = sections[link]
        strings = bytes(changed[names[4] : names[4] + names[5]])
        added = b""
        for at in range(offset, offset + size, SYMBOL.size):
            name_at, info, other, where, value, extent = SYMBOL.unpack_from(changed, at)
            if where != UNDEFINED or not name_at:
                continue
            own = own_name(strings[name_at : strings.index(b"\0", name_at)].decode())
            if is_ours(own):
                SYMBOL.pack_into(changed, at, len(strings) + len(added), info, other, where, value, extent)
                added += own.encode() + b"\0"
        # A name may be the end of another, so none is changed in place: a longer table goes to the end of the file.
        names[4], names[5] = len(changed), len(strings) + len(added)
        changed += strings + added
        SECTION.pack_into(changed, first_section + link * entry_bytes, *names)
    return bytes(changed)
