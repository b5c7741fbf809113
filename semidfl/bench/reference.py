"""The reference: a round as a user would write it, one client after another, eager and in float32.

Plain networks, torch.optim, batches drawn and augmented for the client at hand, then the mean over its neighbours. It
does the work that our round does, in the same numbers: steps, batch sizes, views, samples, tests. It is no straw man:
a batch is drawn, shifted and flipped in a few vectorised operations, all data lie on the device, nothing is copied
to the host but what a decision needs.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from semidfl.bench.plain import plain_classifier, plain_generator
from semidfl.cohort import Cohort
from semidfl.learn.diffusion import Schedule, from_signal
from semidfl.learn.pseudo_label import sharpen
from semidfl.learn.sampler import guided, solve
from semidfl.methods.base import Method
from semidfl.setup import Setup

__all__ = ["Reference"]

_PASS = 500
"""samples of a pass without gradients"""


@dataclass
class Client:
    """What one client owns."""

    labelled: Tensor  # places in the pool
    unlabelled: Tensor
    classifier: nn.Module
    optimiser: torch.optim.Optimizer
    generator: nn.Module | None = None
    adam: torch.optim.Optimizer | None = None
    pseudo: tuple[Tensor, Tensor] | None = None  # places, soft labels
    made: tuple[Tensor, Tensor, Tensor, Tensor] | None = None  # images, label vectors, images and labels to check by


@dataclass
class Reference:
    setup: Setup
    clients: list[Client]
    images: Tensor
    labels: Tensor
    pseudo_labels: bool
    scale: Tensor
    shift: Tensor
    threads: int = field(default_factory=torch.get_num_threads)
    seconds: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, method: Method, cohort: Cohort) -> "Reference":
        """With the clients of a cohort, their data and their weights."""
        setup, shards, clients = method.setup, cohort.shards, []
        c, g = setup.config.classifier, setup.config.generator
        for i in range(len(cohort.ids)):
            net = plain_classifier(setup.config, setup.space).to(setup.device)
            sgd = torch.optim.SGD(net.parameters(), c.lr, c.momentum, weight_decay=c.weight_decay, nesterov=c.nesterov)
            optimiser = sgd if c.optimizer == "sgd" else torch.optim.Adam(net.parameters(), c.lr)
            held = [x.table[i, : x.held[i]] for x in (shards.labelled, shards.unlabelled)]
            client = Client(held[0], held[1], net, optimiser)
            if cohort.generator is not None:
                client.generator = plain_generator(setup.config, setup.space).to(setup.device)
                client.adam = torch.optim.Adam(client.generator.parameters(), g.lr)
            clients.append(client)
        pseudo = type(method).pseudo_label is not Method.pseudo_label
        ones = torch.tensor([setup.space.mean, setup.space.std], device=setup.device)[:, :, None, None]
        return cls(setup, clients, shards.images, shards.labels, pseudo, 1 / (255 * ones[1]), -ones[0] / ones[1])

    def warm_up(self, generate: bool) -> None:
        """A first round, which is not counted; on a CPU with one thread and with all, to keep what is faster.

        Operations this small often lose by a second thread, and a loop written with care would notice.
        """
        self.round(generate)
        if self.setup.device.type == "cpu" and self.threads > 1:
            self.threads = min((1, self.threads), key=lambda n: replace(self, threads=n).round()["round"])

    def round(self, generate: bool = False, test: bool = False) -> dict[str, float]:
        """One round; returns seconds by phase."""
        ours = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            return self._round(generate, test)
        finally:
            torch.set_num_threads(ours)

    def _round(self, generate: bool, test: bool) -> dict[str, float]:
        self.seconds = {}
        if self.pseudo_labels:
            with self._phase("pseudo-label"):
                self._label()
        if self.clients[0].generator is not None:
            with self._phase("generator"):
                for client in self.clients:
                    self._train_generator(client)
            if generate:
                with self._phase("generate"):
                    for client in self.clients:
                        self._generate(client)
        with self._phase("classifier"):
            for client in self.clients:
                self._train_classifier(client)
            accuracy = self._judge()
        with self._phase("mix"):
            self._mix(accuracy)
        if test:
            with self._phase("test"):
                self._test()
        return self.seconds | {"round": sum(self.seconds.values())}

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        self._wait()
        started = time.perf_counter()
        yield
        self._wait()
        self.seconds[name] = time.perf_counter() - started

    def _wait(self) -> None:
        if self.setup.device.type == "cuda":
            torch.cuda.synchronize(self.setup.device)

    # --- batches -------------------------------------------------------------------------------------------

    def _augment(self, x: Tensor) -> Tensor:
        """Each image shifted by up to `pad` with zeros coming in, flipped half the time: uint8 (B, ch, H, W)."""
        a, (batch, _, height, width) = self.setup.config.augment, x.shape
        padded = F.pad(x, (a.pad,) * 4)
        down, right = torch.randint(2 * a.pad + 1, (2, batch, 1), device=x.device)
        rows, columns = (at + torch.arange(n, device=x.device) for at, n in ((down, height), (right, width)))
        if a.flip:
            columns = torch.where(torch.rand(batch, 1, device=x.device) < 0.5, columns.flip(1), columns)
        every = torch.arange(batch, device=x.device)[:, None, None]
        return padded[every, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)

    def _normal(self, images: Tensor) -> Tensor:
        return images.float() * self.scale + self.shift

    def _batch(self, client: Client, size: int, generated: bool) -> tuple[Tensor, Tensor] | None:
        """uint8 images and label vectors of all sources that the client has."""
        parts: list[tuple[Tensor, Tensor]] = []
        device = self.images.device
        if len(client.labelled):
            at = client.labelled[torch.randint(len(client.labelled), (size,), device=device)]
            hot = F.one_hot(self.labels[at], self.setup.space.classes).float()
            parts.append((self._augment(self.images[at]), hot))
        if client.pseudo is not None and len(client.pseudo[0]):
            at = torch.randint(len(client.pseudo[0]), (size,), device=device)
            parts.append((self._augment(self.images[client.pseudo[0][at]]), client.pseudo[1][at]))
        if generated and client.made is not None:
            at = torch.randint(len(client.made[0]), (size,), device=device)
            parts.append((client.made[0][at], client.made[1][at]))
        return (torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])) if parts else None

    # --- the steps of a round ------------------------------------------------------------------------------

    @torch.no_grad()
    def _label(self) -> None:
        """Every client labels with its own classifier and with a neighbour's, and keeps what is sure enough."""
        config, graph = self.setup.config.pseudo, self.setup.graph
        for i, client in enumerate(self.clients):
            if not len(client.unlabelled):
                continue
            near = [i, *graph.neighbours[i]]
            who = [i] + [near[int(torch.randint(len(near), ()))] for _ in range(config.views - 1)]
            p = torch.stack([self._predict(self.clients[j].classifier, client.unlabelled) for j in who]).mean(0)
            p = sharpen(p, config.sharpen)
            # All are kept: ours draws batches of the same size however many qualify, and so does this.
            (p.amax(1) > config.threshold).sum().item()
            client.pseudo = client.unlabelled, p

    def _predict(self, network: nn.Module, places: Tensor) -> Tensor:
        parts = (self._augment(self.images[at]) for at in places.split(_PASS))
        return torch.cat([network(self._normal(x)).softmax(1) for x in parts])

    def _train_generator(self, client: Client) -> None:
        g, network, adam = self.setup.config.generator, client.generator, client.adam
        assert network is not None
        assert adam is not None
        schedule = Schedule.linear(g.steps, self.setup.device)
        for _ in range(g.iterations or self.setup.config.classifier.iterations):
            drawn = self._batch(client, g.batch, generated=False)
            if drawn is None:
                return
            clean, labels = drawn[0].float() / 127.5 - 1, drawn[1]
            level = torch.randint(g.steps, (len(clean),), device=clean.device)
            noise = torch.randn_like(clean)
            labels = labels * (torch.rand(len(clean), 1, device=clean.device) >= g.label_dropout)
            error = network(schedule.noisy(clean, level, noise), level, labels) - noise
            adam.zero_grad()
            error.square().mean().backward()
            adam.step()

    @torch.no_grad()
    def _generate(self, client: Client) -> None:
        g, space, network = self.setup.config.generator, self.setup.space, client.generator
        assert network is not None
        schedule = Schedule.linear(g.steps, self.setup.device)
        labels = torch.cat(
            [torch.arange(n, device=self.setup.device) % space.classes for n in (g.samples, g.validation)]
        )
        hot, images = F.one_hot(labels, space.classes).float(), []
        for some in hot.split(_PASS):
            noise = torch.randn(1, len(some), *space.shape, device=self.setup.device)
            one = guided(lambda x, level, y: network(x[0], level[0], y[0])[None], some[None], g.guidance)
            images.append(from_signal(solve(one, noise, schedule, g.sampler_steps))[0])
        made = torch.cat(images)
        client.made = made[: g.samples], hot[: g.samples], made[g.samples :], labels[g.samples :]

    def _train_classifier(self, client: Client) -> None:
        config = self.setup.config
        beta = config.mixup.beta if self.clients[0].generator is not None else 0.0
        for _ in range(config.classifier.iterations):
            drawn = self._batch(client, config.classifier.batch, generated=True)
            if drawn is None:
                return
            images, targets = self._normal(drawn[0]), drawn[1]
            if beta:
                share = float(torch.distributions.Beta(beta, beta).sample())
                share, order = max(share, 1 - share), torch.randperm(len(images), device=images.device)
                images, targets = (torch.lerp(x[order], x, share) for x in (images, targets))
            client.optimiser.zero_grad()
            F.cross_entropy(client.classifier(images), targets).backward()
            client.optimiser.step()

    @torch.no_grad()
    def _judge(self) -> list[float] | None:
        if self.clients[0].made is None or self.setup.config.aggregation.weights == "constant":
            return None
        right = []
        for client in self.clients:
            assert client.made is not None
            scores = client.classifier(self._normal(client.made[2]))
            right.append((scores.argmax(1) == client.made[3]).float().mean())
        return [float(x) for x in right]

    @torch.no_grad()
    def _mix(self, accuracy: Sequence[float] | None) -> None:
        """The weighted mean over the neighbourhood, weights equal or by accuracy (Eq. 12)."""
        networks: list[list[nn.Module]] = [[c.classifier for c in self.clients]]
        if self.clients[0].generator is not None:
            networks.append([c.generator for c in self.clients if c.generator is not None])
        for some in networks:
            before = [[p.clone() for p in network.parameters()] for network in some]
            for i, network in enumerate(some):
                near = [i, *self.setup.graph.neighbours[i]]
                a = torch.tensor([accuracy[j] if accuracy else 0.0 for j in near]).softmax(0).tolist()
                for k, p in enumerate(network.parameters()):
                    p.copy_(sum(w * before[j][k] for w, j in zip(a, near, strict=True)))

    @torch.no_grad()
    def _test(self) -> list[float]:
        images, labels = self.setup.test_images[0], self.setup.test_labels[0]
        right = []
        for client in self.clients:
            parts = images.split(_PASS)
            scores = torch.cat([client.classifier(self._normal(x)) for x in parts])
            right.append((scores.argmax(1) == labels).float().mean())
        return [float(x) for x in right]
