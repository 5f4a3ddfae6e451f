"""Unpacks a quantised GGUF file to 16-bit floats, so that llama.cpp does the same work as its peers.

python benchmarks/gguf_f16.py IN.gguf OUT.gguf        (needs: pip install gguf)
"""

from __future__ import annotations

import sys

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType, quants


def main() -> None:
    source, target = sys.argv[1:]
    reader = GGUFReader(source)
    writer = GGUFWriter(target, reader.get_field("general.architecture").contents())
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        value, kind = field.contents(), field.types[0]
        if field.name == "general.file_type":
            value = int(LlamaFileType.MOSTLY_F16)
        sub_type = field.types[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, value, kind, sub_type=sub_type)
    for tensor in reader.tensors:
        values = quants.dequantize(tensor.data, tensor.tensor_type)
        is_matrix = len(tensor.shape) > 1
        writer.add_tensor(
            tensor.name,
            values.astype(np.float16 if is_matrix else np.float32),
            raw_dtype=GGMLQuantizationType.F16 if is_matrix else GGMLQuantizationType.F32,
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
