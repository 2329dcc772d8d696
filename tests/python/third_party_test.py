"""Programs that use other people's libraries give on Lockstep what they give on
Gloo: Accelerate, Lightning Fabric and transformers.

`./dev setup` does not install these; a test whose library is missing is skipped.
`.venv/bin/python -m pip install accelerate lightning-fabric transformers` brings
all three.
"""

import importlib.util
import os
import pathlib
import sys
import tempfile
import unittest

import ranks


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))


def part_accelerate(backend):
    dist.init_process_group(backend)
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    dataset = torch.utils.data.TensorDataset(torch.randn(64, 4),
                                             torch.randn(64, 1))
    loader = torch.utils.data.DataLoader(dataset, batch_size=8, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(3):
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    losses = accelerator.gather(loss.detach().reshape(1))
    accelerator.wait_for_everyone()
    return [*losses.tolist(), *parameters_of(model)]


def part_fabric(backend):
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import DDPStrategy

    fabric = Fabric(accelerator="cpu", devices=2,
                    strategy=DDPStrategy(process_group_backend=backend))
    fabric.launch()
    assert fabric.world_size == 2
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = fabric.setup(model, optimizer)
    for step in range(20):
        torch.manual_seed(100 * step + fabric.global_rank)
        loss = model(torch.randn(8, 4)).square().mean()
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
    losses = fabric.all_gather(loss.detach())
    fabric.barrier()
    return [*losses.tolist(), *parameters_of(model)]


def part_transformers(backend):
    dist.init_process_group(backend)
    from transformers import (AutoModelForCausalLM, LlamaConfig,
                              LlamaForCausalLM)

    folder = [tempfile.mkdtemp()] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(folder, 0)
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2,
            vocab_size=128)).save_pretrained(folder[0])
    dist.barrier()
    model = AutoModelForCausalLM.from_pretrained(folder[0], tp_plan="auto")
    whole = AutoModelForCausalLM.from_pretrained(folder[0])
    weight = model.model.layers[0].mlp.down_proj.weight
    assert weight.to_local().shape == (64, 64), weight.to_local().shape
    ids = torch.arange(12).reshape(1, 12)
    with torch.no_grad():
        logits, expected = model(ids).logits, whole(ids).logits
    if hasattr(logits, "full_tensor"):
        logits = logits.full_tensor()
    torch.testing.assert_close(logits, expected)
    return logits.flatten().tolist()


def parameters_of(model):
    return [value for parameter in model.parameters()
            for value in parameter.flatten().tolist()]


def rank_main(part, backend):
    global torch, dist, nn
    import torch
    import torch.distributed as dist
    from torch import nn

    numbers = globals()[f"part_{part}"](backend)
    assert dist.get_backend() == backend, dist.get_backend()
    folder = pathlib.Path(sys.argv[3])
    (folder / f"{backend}{dist.get_rank()}").write_text(repr(numbers))
    dist.destroy_process_group()
    if backend == "gloo":
        ranks.leave()


class ThirdParty(unittest.TestCase):

    def check(self, part, module):
        if importlib.util.find_spec(module) is None:
            self.skipTest(f"{module} is not installed")
        with tempfile.TemporaryDirectory() as folder:
            for backend in ("gloo", "lockstep"):
                ranks.run(self, 2, __file__, part, backend, folder, seconds=300,
                          HF_HUB_OFFLINE="1")
            for rank in range(2):
                gloo, ours = ((pathlib.Path(folder) / f"{backend}{rank}")
                              .read_text() for backend in ("gloo", "lockstep"))
                self.assertEqual(ours, gloo)

    def test_accelerate(self):
        self.check("accelerate", "accelerate")

    def test_lightning_fabric(self):
        self.check("fabric", "lightning_fabric")

    def test_tensor_parallel_transformers(self):
        self.check("transformers", "transformers")


if __name__ == "__main__":
    if "RANK" in os.environ:
        rank_main(*sys.argv[1:3])
    else:
        result = unittest.main(exit=False).result
        skipped = len(result.skipped) == result.testsRun
        sys.exit(77 if skipped else not result.wasSuccessful())
