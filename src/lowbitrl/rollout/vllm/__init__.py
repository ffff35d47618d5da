"""vLLM as the rollout engine: our arithmetic inside it, our bytes fed to it.

Importing this package does not import vLLM. `plugin.register` is what vLLM itself calls, through the
entry point `vllm.general_plugins`, in every process that it starts.
"""
