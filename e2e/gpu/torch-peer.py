"""A process of PyTorch that shares a tensor of a GPU: commands as lines of JSON, one answer each. Node opens the handle, see torch.mjs."""

import ctypes
import gc
import json
import sys

import torch


class DLDevice(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("id", ctypes.c_int32)]


class DLDataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
pointer_of.restype = ctypes.c_void_p
pointer_of.argtypes = [ctypes.py_object, ctypes.c_char_p]


def fields(tensor):
    """What a DLPack capsule says. `data` counts from the storage on: no other process has its addresses."""
    capsule = tensor.__dlpack__()
    found = DLTensor.from_address(pointer_of(capsule, b"dltensor"))
    return {
        "data": (found.data or 0) - tensor.untyped_storage().data_ptr(),
        "device": {"type": found.device.type, "id": found.device.id},
        "dtype": {"code": found.dtype.code, "bits": found.dtype.bits, "lanes": found.dtype.lanes},
        "shape": found.shape[: found.ndim],
        "strides": found.strides[: found.ndim] if found.strides else None,
        "byte_offset": found.byte_offset,
    }


class Peer:
    def __init__(self):
        self.device = torch.device("cuda", 0)
        self.tensor = None
        self.before = None
        self.counter = None

    def values(self, rank, salt):
        rows, columns = self.tensor.shape
        row = torch.arange(rows, device=self.device)[:, None]
        column = torch.arange(columns, device=self.device)[None, :]
        return ((rank * 37 + row * 11 + column * 3 + salt) % 127).to(self.tensor.dtype)

    def fill(self, rank, salt):
        self.tensor.copy_(self.values(rank, salt))
        # Node's streams know nothing of PyTorch's.
        torch.cuda.synchronize()
        return {}

    def share(self, rows, columns, rank, salt):
        # Neither the segment nor the storage begins with the tensor.
        self.before = torch.zeros(1000, dtype=torch.uint8, device=self.device)
        self.tensor = torch.zeros(rows + 1, columns, dtype=torch.float32, device=self.device)[1:]
        self.fill(rank, salt)
        tensor = fields(self.tensor)
        _, handle, size, offset, counter, counter_offset, _, _ = self.tensor.untyped_storage()._share_cuda_()
        self.counter = (counter, counter_offset)
        torch.cuda.synchronize()
        return {"handle": handle.hex(), "offset": offset, "bytes": size, "tensor": tensor, "torch": torch.__version__}

    def bytes(self):
        torch.cuda.synchronize()
        return {"bytes": bytes(self.tensor.cpu().view(torch.uint8).flatten().tolist()).hex()}

    def release(self):
        # What the receiving PyTorch would do: until then the memory is kept for it.
        torch.UntypedStorage._release_ipc_counter(*self.counter, device=self.device)
        self.tensor = self.before = None
        gc.collect()
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()
        return {"left": torch.cuda.memory_allocated(self.device)}


if __name__ == "__main__":
    peer = Peer()
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = getattr(peer, command.pop("do"))(**command)
        except Exception as error:  # told, not died of
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)
