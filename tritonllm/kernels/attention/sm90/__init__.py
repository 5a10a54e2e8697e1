"""Attention in Gluon, for Hopper. A file imports it only where it launches it: Gluon is not there for every GPU."""

from tritonllm.kernels.runtime.releases import keep_gluon_names

keep_gluon_names()  # before any of these kernels is compiled
