"""Runs mixed-precision jobs with Python's torch, for parity tests.

Reads one JSON object from stdin and writes one to stdout, under the same keys:

  scaler    a list of runs of GradScaler. Each: "options" of the scaler; "lr";
            "state", if there, the text of a state_dict() to begin with;
            "factor" of the loss (1); "steps", a list. Two layers, Linear(4, 3)
            and Linear(3, 2), have an SGD each. In step i the loss of
            x * (1 + i / 10) is scaled, backward runs, and then, where the step
            has them:
              "inject"   [layer, parameter, number as text]: into the gradient's
                         first element
              "unscale"  layers whose optimizer is unscaled
              "clip"     the bound for the norm of the first layer's gradients,
                         which must have been unscaled
              "only"     the layers that are stepped (else both)
              "update"   the new scale
            Out: "scale" and "tracker" after each step, "stepped" (a list of the
            optimizers that did), "norms" of the clips, "parameters" at the end,
            "state".
  clip      a list of [norm type, bound]. Out: [norm, clipped gradients].
  autocast  {"lr", "steps", "dtype"}: both layers with a tanh between them
            trained under autocast. Out: "losses", "parameters".

Numbers are made by linspace, the same on both sides.
"""

import json
import sys

import torch
from torch import nn


def data():
    return (torch.linspace(-1, 1, 20).view(5, 4),
            torch.linspace(0, 1, 10).view(5, 2))


def layers():
    made = [nn.Linear(4, 3), nn.Linear(3, 2)]
    with torch.no_grad():
        for layer in made:
            for parameter in layer.parameters():
                values = torch.linspace(-0.5, 0.75, parameter.numel())
                parameter.copy_(values.view_as(parameter))
    return made


def flat(made):
    return [number for layer in made for parameter in layer.parameters()
            for number in parameter.detach().reshape(-1).tolist()]


def loss_of(made, factor):
    x, y = data()
    return nn.functional.mse_loss(
        made[1](torch.tanh(made[0](x * factor))).float(), y)


def run_scaler(job):
    made = layers()
    stepped = []
    optimizers = []
    for i, layer in enumerate(made):
        optimizer = torch.optim.SGD(layer.parameters(), lr=job["lr"])
        optimizer.register_step_post_hook(
            lambda *_, i=i: stepped[-1].append(i))
        optimizers.append(optimizer)
    scaler = torch.amp.GradScaler("cpu", **job["options"])
    if "state" in job:
        scaler.load_state_dict(json.loads(job["state"]))
    result = {"scale": [], "tracker": [], "stepped": stepped, "norms": []}
    for i, step in enumerate(job["steps"]):
        stepped.append([])
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = loss_of(made, 1 + i / 10) * job.get("factor", 1.0)
        scaler.scale(loss).backward()
        for layer, parameter, number in step.get("inject", []):
            gradient = list(made[layer].parameters())[parameter].grad
            gradient.view(-1)[0] = float(number)
        for layer in step.get("unscale", []):
            scaler.unscale_(optimizers[layer])
        if "clip" in step:
            result["norms"].append(nn.utils.clip_grad_norm_(
                made[0].parameters(), step["clip"]).item())
        for layer in step.get("only", [0, 1]):
            scaler.step(optimizers[layer])
        scaler.update(step.get("update"))
        result["scale"].append(scaler.get_scale())
        result["tracker"].append(scaler.state_dict()["_growth_tracker"])
    result["parameters"] = flat(made)
    result["state"] = json.dumps(scaler.state_dict())
    return result


def run_clip(job):
    norm_type, bound = job
    parameters = [torch.zeros(7, 5), torch.zeros(11), torch.zeros(1)]
    for i, parameter in enumerate(parameters):
        values = torch.linspace(-1 - i, 2, parameter.numel())
        parameter.grad = values.view_as(parameter)
    norm = nn.utils.clip_grad_norm_(parameters, bound, float(norm_type))
    return [norm.item(), [number for parameter in parameters
                          for number in parameter.grad.view(-1).tolist()]]


def run_autocast(job):
    made = layers()
    optimizer = torch.optim.SGD([*made[0].parameters(), *made[1].parameters()],
                                lr=job["lr"])
    losses = []
    for i in range(job["steps"]):
        optimizer.zero_grad()
        with torch.autocast("cpu", getattr(torch, job["dtype"])):
            loss = loss_of(made, 1 + i / 10)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "parameters": flat(made)}


def main():
    torch.set_num_threads(1)
    jobs = json.load(sys.stdin)
    json.dump({"scaler": [run_scaler(job) for job in jobs["scaler"]],
               "clip": [run_clip(job) for job in jobs["clip"]],
               "autocast": [run_autocast(job) for job in jobs["autocast"]]},
              sys.stdout)


main()
