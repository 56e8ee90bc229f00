"""Inference: rows are read piece by piece and continued token by token, with the memory on."""

from ttcd_jax.inference.decode import decode as decode
from ttcd_jax.inference.generate import Generation as Generation
from ttcd_jax.inference.generate import Request as Request
from ttcd_jax.inference.model import inference_model as inference_model
from ttcd_jax.inference.prefill import prefill as prefill
from ttcd_jax.inference.sampling import SamplingConfig as SamplingConfig
from ttcd_jax.inference.state import start_state as start_state
from ttcd_jax.inference.text_memory import TextMemory as TextMemory
from ttcd_jax.inference.text_memory import dense as dense
from ttcd_jax.inference.text_memory import load_memory as load_memory
from ttcd_jax.inference.text_memory import mean as mean
from ttcd_jax.inference.text_memory import memories_of as memories_of
from ttcd_jax.inference.text_memory import read_memory as read_memory
from ttcd_jax.inference.text_memory import start_from as start_from
