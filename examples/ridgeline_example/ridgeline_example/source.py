"""Text files with one document per paragraph: `ridge data prepare --input notes.para`."""

from collections.abc import Iterator

from ridgeline.loaders.inputs import SourceFormat, Unit
from ridgeline.loaders.records import BadRecord, Document, Place, RecordFields, document_from_bytes


def read(unit: Unit, fields: RecordFields) -> Iterator[Document | BadRecord]:
    """Yield the paragraphs of a file, which empty lines separate."""
    for number, paragraph in enumerate(unit.path.read_bytes().split(b"\n\n"), start=1):
        if paragraph.strip():
            yield document_from_bytes(paragraph.strip(), Place(unit.path, number))


PARAGRAPHS = SourceFormat(read, suffixes=(".para",))
