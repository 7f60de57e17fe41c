"""The models of reference.py, under Burn's names and as Burn computes them, and their data."""

import itertools
import math

import torch
import torch.nn.functional as F
from torch import nn

import cases
from cases import Case


def hashed(*numbers):
    """64 bits of SplitMix64's finalizer."""
    state = 0
    for number in numbers:
        state = (state + number + 1) * 0x9E3779B97F4A7C15 % 2**64
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
        state ^= state >> 31
    return state


class Problem:
    """A model under Burn's names, its data and its cases."""

    def weights(self, model):
        return {path: value.flatten().tolist() for path, _, _, value in burn_parameters(model)}


def burn_parameters(model):
    """The path, module and name of each parameter, and its value as in Burn's module."""
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            value = parameter.detach()
            if isinstance(module, nn.Linear) and name == "weight":
                value = value.T
            if isinstance(module, nn.LayerNorm):
                name = {"weight": "gamma", "bias": "beta"}[name]
            yield f"{path}.{name}".lstrip("."), module, parameter, value


def parameters(model):
    """The initial shapes and values, as in Burn."""
    described = lambda value: {"shape": list(value.shape), "values": [round(x, 3) for x in value.flatten().tolist()]}
    return {path: described(value) for path, _, _, value in burn_parameters(model)}


def initialize(model):
    """Numbers with three decimals, which are the same in every program."""
    for number, (_, module, parameter, _) in enumerate(burn_parameters(model)):
        bound, middle = 1.0, 0.0
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            bound = math.sqrt(6 / module.weight[0].numel()) if parameter is module.weight else 0.1
        elif isinstance(module, nn.LayerNorm):
            bound, middle = 0.1, 1.0 if parameter is module.weight else 0.0
        uniform = [middle + bound * (hashed(number, at) / 2**63 - 1) for at in range(parameter.numel())]
        values = torch.tensor([round(value, 3) for value in uniform])
        with torch.no_grad():
            parameter.copy_(values.reshape(parameter.shape))
    return model


class LineModel(nn.Linear):
    def forward(self, x, labels):
        predicted = super().forward(x)
        return {"loss": F.mse_loss(predicted, labels), "logits": predicted}


class Line(Problem):
    """Sample i of N is x = i/N, y = 2x + 3; the model w x + b begins at w = 0.5, b = 0."""

    name = "line"
    cases = cases.line()

    def model(self):
        model = LineModel(1, 1)
        with torch.no_grad():
            model.weight.fill_(0.5)
            model.bias.fill_(0.0)
        return model

    def samples(self, count, _):
        numbers = torch.tensor([number / count for number in range(count)])[:, None]
        return [{"x": x, "labels": 2 * x + 3} for x in numbers]

    def described(self):
        return {"parameters": parameters(self.model())}


class TokensModel(nn.Module):
    """A model whose loss is a mean over tokens; samples have several of them."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, labels, **named):
        """Accepts arguments of any name: only then does Hugging Face count the tokens of an update."""
        return {"loss": ((self.weight - labels) ** 2).sum() / named.get("num_items_in_batch", labels.numel())}


class UnweightedModel(TokensModel):
    def forward(self, labels):
        return super().forward(labels)


class Tokens(Problem):
    """An update of two samples, with three tokens and with one."""

    name = "tokens"

    def __init__(self, name, model):
        self.model, self.cases = model, [Case(name, cases.tokens(), 2)]

    def samples(self, *_):
        return [{"labels": torch.tensor(labels)} for labels in ([1.0, 1.0, 2.0], [4.0])]


VOCABULARY, WIDTH, HEADS, LAYERS, INNER, LENGTH, CLASSES = 32, 8, 2, 2, 16, 12, 4


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x, padding):
        rows = len(x)
        split = lambda of: of(x).reshape(rows, LENGTH, HEADS, WIDTH // HEADS).transpose(1, 2)
        # The root of 4: a root that is not a whole number would be f32 in Burn.
        scores = split(self.query) @ split(self.key).mT / math.sqrt(WIDTH // HEADS)
        weights = scores.masked_fill(padding[:, None, None, :], -1e4).softmax(-1)
        return self.output((weights @ split(self.value)).transpose(1, 2).reshape(rows, LENGTH, WIDTH))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear_inner, self.linear_outer = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x):
        # Some of Burn's backends differentiate the exact GELU with a formula of few digits.
        return self.linear_outer(F.gelu(self.linear_inner(x), approximate="tanh"))


class EncoderLayer(nn.Module):
    """Burn's TransformerEncoderLayer, normalised after each part."""

    def __init__(self):
        super().__init__()
        self.mha, self.pwff, self.norm_1, self.norm_2 = Attention(), FeedForward(), nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x, padding):
        x = self.norm_1(x + self.mha(x, padding))
        return self.norm_2(x + self.pwff(x))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(EncoderLayer() for _ in range(LAYERS))

    def forward(self, x, padding):
        for layer in self.layers:
            x = layer(x, padding)
        return x


class Classifier(nn.Module):
    """Adds the embeddings of tokens and positions, encodes them, and takes the mean over all tokens but padding."""

    # Trainer asks for a config if labels are smoothed.
    config = None

    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.encoder, self.output = Encoder(), nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens, labels=None):
        padding = tokens == 0
        x = self.encoder(self.tokens(tokens) + self.places.weight, padding)
        real = ~padding[..., None]
        logits = self.output((x * real).sum(1) / real.sum(1))
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Transformer(Problem):
    """Sequences of tokens 1 to 31, padded with 0: most tokens of a sequence equal its class modulo 4."""

    name = "transformer"
    cases = cases.transformer()
    counts = {"train": 48, "eval": 20}

    def model(self):
        return initialize(Classifier())

    def rows(self, part):
        rows = []
        for row in range(self.counts[part]):
            draw = lambda *place: hashed(len(part), row, *place)
            label = draw(0) % CLASSES
            rest = lambda at: 1 + draw(at, 1) % (VOCABULARY - 1)
            typical = lambda at: label + CLASSES * (1 + draw(at, 2) % (VOCABULARY // CLASSES - 1))
            tokens = [typical(at) if draw(at, 3) % 5 < 2 else rest(at) for at in range(1, 5 + draw(1) % (LENGTH - 3))]
            rows.append({"tokens": tokens, "label": label})
        return rows

    def samples(self, count, part):
        padded = lambda tokens: torch.tensor(tokens + [0] * (LENGTH - len(tokens)))
        rows = self.rows(part)[:count]
        return [{"tokens": padded(row["tokens"]), "labels": torch.tensor(row["label"])} for row in rows]

    def described(self):
        return {
            "model": {
                "vocabulary": VOCABULARY,
                "d_model": WIDTH,
                "n_heads": HEADS,
                "n_layers": LAYERS,
                "d_ff": INNER,
                "length": LENGTH,
                "classes": CLASSES,
            },
            "parameters": parameters(self.model()),
            "train": self.rows("train"),
            "eval": self.rows("eval"),
        }


SIDE = 14
# Seven rows of five pixels each.
DIGITS = [
    "01110100011000110001100011000101110",
    "00100011000010000100001000010001110",
    "01110100010000100010001000100011111",
    "11111000100010000010000011000101110",
    "00010001100101010010111110001000010",
    "11111100001111000001000011000101110",
    "00110010001000011110100011000101110",
    "11111000010001000100010000100001000",
    "01110100011000101110100011000101110",
    "01110100011000101111000010001001100",
]


class CnnModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 8, 3)
        self.linear1, self.linear2 = nn.Linear(32, 16), nn.Linear(16, 10)

    def forward(self, image, labels):
        x = F.max_pool2d(F.relu(self.conv1(image)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        logits = self.linear2(F.relu(self.linear1(x.flatten(1))))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Cnn(Problem):
    """Drawn digits of 14 by 14 pixels, shifted and with noise; the model divides their bytes by 256."""

    name = "cnn"
    cases = cases.cnn()
    counts = {"train": 96, "eval": 40}

    def model(self):
        return initialize(CnnModel())

    def rows(self, part):
        rows = []
        for row in range(self.counts[part]):
            draw = lambda *place: hashed(len(part), row, *place)
            label, shift, light = draw(0) % 10, draw(1) % 5, 128 + draw(2) % 64
            pixels = bytearray()
            for y, x in itertools.product(range(SIDE), range(SIDE)):
                column = (x - shift) // 2
                drawn = 0 <= column < 5 and DIGITS[label][5 * (y // 2) + column] == "1"
                pixels.append(light * drawn + draw(3, y, x) % 64)
            rows.append({"pixels": pixels.hex(), "label": label})
        return rows

    def samples(self, count, part):
        image = lambda row: torch.tensor(list(bytes.fromhex(row["pixels"]))).reshape(1, SIDE, SIDE) / 256
        return [{"image": image(row), "labels": torch.tensor(row["label"])} for row in self.rows(part)[:count]]

    def described(self):
        return {
            "parameters": parameters(self.model()),
            "train": self.rows("train"),
            "eval": self.rows("eval"),
        }


PROBLEMS = {problem.name: problem for problem in (Line(), Transformer(), Cnn())}
TOKENS = [Tokens("weighted", TokensModel), Tokens("unweighted", UnweightedModel)]
