"""Kernels of CUDA graphs get the names of their instructions: in a capture of an H200, and in made modules whose assignment is known."""

from __future__ import annotations

import json
import lzma
import random
import re
import shutil
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest
from jax.profiler import ProfileData
from jaxlib._hlo import HloModule

from ridgeline.explain.trace.analysis import analyze
from ridgeline.explain.trace.capture import find_capture
from ridgeline.explain.trace.executions import executions
from ridgeline.explain.trace.graphs import align, schedules
from ridgeline.explain.trace.load import load_profile
from ridgeline.explain.trace.read import read_host
from ridgeline.explain.trace.wire import MISSING
from ridgeline.hlo.parse import parse
from ridgeline.rundir.analysis import to_json
from tests.explain.xspace import event, gpu, host, kernel, step, write

CAPTURE = Path(__file__).parent / "gpu_capture"
STEPS, LAYERS, LOSS_BLOCKS = 2, 8, 128
COPIES = re.compile(r"memcpy|memset", re.I)
CUBLAS, CUDNN = re.compile(r"nvjet_"), re.compile(r"cudnn")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """The capture of an H200, unpacked."""
    found = tmp_path_factory.mktemp("gpu_capture")
    (found / "gpu.xplane.pb").write_bytes(lzma.decompress((CAPTURE / "gpu.xplane.pb.xz").read_bytes()))
    shutil.copy(CAPTURE / "capture.json", found)
    return found


@pytest.fixture(scope="module")
def profile(directory):
    return load_profile(find_capture(directory))


@pytest.fixture(scope="module")
def analysis(profile):
    return analyze(profile)


@pytest.fixture(scope="module")
def report(analysis):
    return to_json(analysis)


@pytest.fixture(scope="module")
def program(profile):
    (found,) = profile.programs.by_key.values()
    return found


@pytest.fixture(scope="module")
def named(directory, profile):
    """(graph, kernel, instruction) of every kernel, in order of their start."""
    before, after = read_host(directory / "gpu.xplane.pb"), profile.hosts[0].host
    (old,), (new,) = before.devices, after.devices
    assert old.ops.start.tolist() == new.ops.start.tolist()
    columns = (old.ops.op, old.ops.name, new.ops.op)
    texts = (before.strings, before.strings, after.strings)
    return list(zip(*([text[n] for n in column.tolist()] for column, text in zip(columns, texts, strict=True)), strict=True))


@pytest.fixture(scope="module")
def raw_ns(directory):
    """Kernel -> nanoseconds, read by JAX."""
    found = defaultdict(float)
    for plane in ProfileData.from_file(str(directory / "gpu.xplane.pb")).planes:
        if plane.name.startswith("/device:GPU"):
            for line in plane.lines:
                for e in line.events:
                    found[e.name] += e.duration_ns
    return found


def sanitized(name: str) -> str:
    return re.sub(r"[.\-]", "_", name)


def test_every_kernel_in_a_graph_gets_an_instruction_and_fusions_their_own(named, program):
    instructions = {i.name: i for _, i in program.module.instructions()}
    equal = defaultdict(set)
    for i in instructions.values():
        equal[i.deduplicated_name or i.name] |= {sanitized(i.name), sanitized(i.deduplicated_name)}
    assert len(named) == 6430 and all(graph.startswith("command_buffer") for graph, _, _ in named)
    assert {name for _, _, name in named} <= instructions.keys()
    fusions = [(kernel_name, instructions[name]) for _, kernel_name, name in named if instructions[name].opcode == "fusion"]
    assert len(fusions) > 2000
    assert [(k, i.name) for k, i in fusions if k not in equal[i.deduplicated_name or i.name] and not COPIES.match(k)] == []
    copied = {instructions[name].opcode for _, kernel_name, name in named if COPIES.match(kernel_name) and kernel_name != "Memset 0"}
    assert copied == {"copy", "fusion-start"}


def test_instructions_run_as_often_as_the_program_says(profile, program):
    host_, (device,) = profile.hosts[0].host, profile.hosts[0].host.devices
    seen = {}
    for each in executions(host_, device.ops, profile.programs):
        seen[each.op] = each.count
        assert each.count == STEPS * program.runs[each.op], each.op
        kernels = device.ops.name[each.rows].reshape(each.count, -1)  # of each execution
        assert (kernels == kernels[0]).all(), each.op
    multiplying = {name for name, found in program.kernels.items() if found.flops}
    assert len(multiplying) > 20 and multiplying <= seen.keys()


def test_times_of_library_calls_are_those_of_the_librarys_kernels(analysis, program, raw_ns):
    calls = {i.name: i.attributes for _, i in program.module.instructions() if i.opcode == "custom-call"}
    for library, target in ((CUBLAS, "__cublas$lt$matmul"), (CUDNN, "__cudnn$fmha")):
        ours = [o for o in analysis.operations if target in calls.get(o.op, "")]
        assert {o.op for o in ours} == {name for name, attributes in calls.items() if target in attributes}
        assert all(library.search(o.kernel_name) for o in ours)
        raw_s = sum(ns for name, ns in raw_ns.items() if library.search(name)) / 1e9
        assert sum(o.time_s for o in ours) * STEPS == pytest.approx(raw_s, rel=1e-6)


def test_attention_of_cudnn_has_its_pass_and_source(report):
    found = {o["phase"]: o for o in report["operations"] if o["category"] == "attention"}
    assert found.keys() == {"forward", "backward"}
    for o in found.values():
        assert (o["component"], o["runs"]) == ("attention", LAYERS) and "models/attention/cudnn.py" in o["source"]
    assert (found["forward"]["kernels"], found["backward"]["kernels"]) == (LAYERS, 5 * LAYERS)


def test_components_sum_to_compute_and_nearly_nothing_is_unknown(report):
    (device,) = report["devices"]
    compute_s = device["compute_s"] / STEPS
    assert sum(c["time_s"] for c in report["components"]) == pytest.approx(compute_s, rel=1e-3)  # kernels of a graph may overlap a little
    by_part = {(c["component"], c["phase"]): c["time_s"] for c in report["components"]}
    for part in (
        *(("attention", "forward"), ("attention", "backward"), ("mlp", "forward"), ("mlp", "backward")),
        *(("loss", "forward"), ("norm", "forward"), ("norm", "backward"), ("embed", "forward"), ("optimizer", "update")),
    ):
        assert by_part[part] > 0.001 * compute_s, part
    unknown_s = sum(time_s for (component, phase), time_s in by_part.items() if "unknown" in (component, phase))
    assert 0 < unknown_s < 0.03 * compute_s


def test_the_parts_of_a_step_sum_to_the_step(report, raw_ns):
    (device,) = report["devices"]
    assert device["communication_s"] == 0
    assert device["compute_s"] + device["exposed_copy_s"] + device["idle_s"] == pytest.approx(device["total_s"], rel=1e-6)
    busy_s = sum(raw_ns.values()) / 1e9
    assert device["compute_s"] + device["exposed_copy_s"] == pytest.approx(busy_s, rel=1e-3)
    assert sum(ns for name, ns in raw_ns.items() if COPIES.match(name)) / 1e9 == pytest.approx(device["exposed_copy_s"], rel=0.01)


def test_matmuls_run_at_a_possible_rate(report):
    shapes = {(m["batch"], m["m"], m["n"], m["k"]): m for m in report["matmuls"]}
    assert shapes[1, 131072, 8192, 2048]["runs"] == 3 * LAYERS  # gate and up, and the gradient of down's input
    assert shapes[1, 1024, 128256, 2048]["runs"] == LOSS_BLOCKS
    assert all(0.3 < m["of_peak"] < 1 for m in report["matmuls"])


def test_memory_of_the_program_is_in_the_capture(report):
    (memory,) = report["memory"]
    assert 70e9 < memory["peak_bytes"] < 80e9
    assert memory["peak_at"]["component"] == "mlp" and memory["peak_at"]["phase"] == "backward"


def test_kernel_times_equal_those_of_xprof(directory, report, raw_ns):
    from xprof.convert import raw_to_tool_data

    table, _ = raw_to_tool_data.xspace_to_tool_data([str(directory / "gpu.xplane.pb")], "kernel_stats", {})
    found = json.loads(table)
    columns = [column["id"] for column in found["cols"]]
    xprof_us = Counter()
    for row in found["rows"]:
        each = dict(zip(columns, (cell["v"] for cell in row["c"]), strict=True))
        xprof_us[each["kernel_name"]] += each["total_duration_us"]
    assert {name: raw_ns[name] / 1e3 for name in xprof_us} == {name: pytest.approx(us, rel=1e-6) for name, us in xprof_us.items()}
    compute_us = sum(us for name, us in xprof_us.items() if not COPIES.match(name))
    assert sum(c["time_s"] for c in report["components"]) * STEPS * 1e6 == pytest.approx(compute_us, rel=1e-6)


def test_the_text_of_the_program_gives_the_same_names(named, directory, program, profile):
    host_ = profile.hosts[0].host
    (span,) = host_.modules.values()
    proto = (directory / "gpu.xplane.pb").read_bytes()[slice(*span)]
    text = parse(HloModule.from_serialized_hlo_module_proto(module_of(proto)).to_string())
    launches = defaultdict(list)
    for (graph, name, instruction), correlation in zip(named, host_.devices[0].ops.correlation.tolist(), strict=True):
        launches[graph, correlation].append((name, instruction))
    assert len(launches) > 100
    distinct = {tuple(name for name, _ in launch): [instruction for _, instruction in launch] for launch in launches.values()}
    candidates = list(schedules(text))
    for kernels, instructions in distinct.items():
        assert align(kernels, candidates) == instructions


def module_of(hlo_proto: bytes) -> bytes:
    """The HloModuleProto in an HloProto, its first field."""
    length, shift, at = 0, 0, 1
    while True:
        length |= (hlo_proto[at] & 127) << shift
        shift, at = shift + 7, at + 1
        if hlo_proto[at - 1] < 128:
            return hlo_proto[at : at + length]


PLAIN = ("add", "multiply", "convert", "select", "transpose")


@dataclass
class Made:
    """An instruction and the kernels it launches."""

    text: str
    name: str = ""
    kernels: tuple[str, ...] = ()
    opcode: str = "fusion"


class Maker:
    """Instructions at random, of all kinds that a GPU program has."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.number = 0
        self.called: list[str] = []
        self.shared: dict[str, list[str]] = defaultdict(list)

    def next(self) -> int:
        self.number += self.rng.choice((1, 1, 1, 7))
        return self.number

    def fusion(self) -> Made:
        """A fusion; of equal ones, all launch the kernel of the same one, which need not be the one that the HLO names."""
        what, number = self.rng.choice(PLAIN), self.next()
        name = f"loop_{what}_fusion.{number}"
        others = self.shared[what]
        metadata, kernel_name = "", name
        if self.rng.random() < 0.5:
            others.append(name)
            metadata = f', metadata={{op_name="x" deduplicated_name="{others[0]}"}}'
            kernel_name = others[min(1, len(others) - 1)] if len(others) > 2 else name
        return Made(f"%{name} = f32[8]{{0}} fusion(%p), kind=kLoop, calls=%{self.body(what)}{metadata}", name, (sanitized(kernel_name),))

    def body(self, opcode: str, name: str = "") -> str:
        number = self.next()
        root = name or f"{opcode}.{number}"
        operand = "%q" if opcode not in ("add", "multiply") else "%q, %q"
        more = (
            ", dimensions={0}, to_apply=%less" if opcode == "sort" else ", dimensions={0}" if opcode in ("broadcast", "transpose") else ""
        )
        lines = (
            f"%fused.{number} (q: f32[8]) -> f32[8] {{",
            "  %q = f32[8]{0} parameter(0)",
            f"  ROOT %{root} = f32[8]{{0}} {opcode}({operand}){more}",
        )
        self.called.append("\n".join((*lines, "}\n")))
        return f"fused.{number}"

    def custom_call(self, target: str, kernels: tuple[str, ...], name: str = "custom-call", config: str = "") -> Made:
        name = f"{name}.{self.next()}"
        return Made(f'%{name} = f32[8]{{0}} custom-call(%p), custom_call_target="{target}"{config}', name, kernels)

    def cublas(self) -> Made:
        kernels = self.rng.choice(
            (("nvjet_sm90_tst_128x64",), ("nvjet_sm90_tss_splitK_TNT", "void cublasLt::splitKreduce_kernel<32, 16>(int)"))
        )
        cleared = self.rng.choice(((), ("Memset 0",)))
        name = self.rng.choice(("custom-call", "cublas-lt-matmul"))
        return self.custom_call("__cublas$lt$matmul", (*cleared, *kernels), name)

    def cudnn(self) -> Made:
        kernels = [
            "void cudnn::fusion::compute_dot_do_o<true>()",
            "cudnn_generated_sdpa_bprop_kernel0_0",
            "void cudnn::fusion::convert_dq()",
        ]
        target, count = self.rng.choice((("__cudnn$fmhaSoftmax", 1), ("__cudnn$fmhaSoftmaxBackward", 3)))
        return self.custom_call(target, ("Memset 3", *kernels[:count]), "dot_product_attention")

    def cub(self) -> Made:
        kernels = (
            "Memset 3",
            "Memset 3",
            "void cub::_V_3::histogram()",
            "void cub::_V_3::scan()",
            "Memset 3",
            "void cub::_V_3::onesweep()",
        )
        return self.custom_call("xla.gpu.ext.cub_sort_pairs", kernels)

    def pallas(self) -> Made:
        config = ', backend_config={debug = false, grid_x = 4 : i32, name = "expert_matmul", num_stages = 3 : i32}'
        return self.custom_call("__gpu$xla.gpu.triton", (f"expert_matmul__{self.rng.randint(1, 9)}",), "pallas_call", config)

    def sort(self) -> Made:
        root, name = f"sort.{self.next()}.1", f"fusion.{self.next()}"
        copies = ("memcpy128",) * self.rng.randint(0, 2)
        return Made(f"%{name} = f32[8]{{0}} fusion(%p), kind=kCustom, calls=%{self.body('sort', root)}", name, (*copies, sanitized(root)))

    def fill(self) -> Made:
        name = f"loop_broadcast_fusion.{self.next()}"
        return Made(f"%{name} = f32[8]{{0}} fusion(%p), kind=kLoop, calls=%{self.body('broadcast')}", name, ("Memset 0",))

    def copies(self) -> list[Made]:
        """Copies in a row, which all run or all became unnecessary."""
        kernels = self.rng.choice(((), ("memcpy32_post",), ("memcpy128",)))
        names = [f"copy.{self.next()}" for _ in range(self.rng.randint(1, 3))]
        return [Made(f"%{name} = f32[8]{{0}} copy(%p)", name, kernels) for name in names]

    def collective(self) -> Made:
        opcode, kernel_name = self.rng.choice((("all-reduce", "AllReduce_Sum_bf16_RING_LL"), ("all-gather", "AllGather_RING_LL")))
        name = f"{opcode}.{self.next()}"
        more = "to_apply=%sum" if opcode == "all-reduce" else "dimensions={0}"
        return Made(f"%{name} = f32[8]{{0}} {opcode}(%p), replica_groups={{{{0}}}}, {more}", name, (f"ncclDevKernel_{kernel_name}(int)",))

    def nothing(self) -> Made:
        return Made(f"%bitcast.{self.next()} = f32[8]{{0}} bitcast(%p)")

    def schedule(self, length: int) -> list[Made]:
        """Instructions in order. What kernels do not show is left out: no copy or fill before a call that may begin with one itself, and no
        two calls of cuDNN or CUB in a row."""
        found = [self.fusion()]
        while len(found) < length:
            last = next(each.name for each in reversed(found) if each.kernels)
            kinds = [self.fusion] * 6 + [self.pallas, self.collective, self.nothing]
            if not last.startswith(("copy", "loop_broadcast")):
                kinds += [self.cublas] * 3
            if last.startswith(("loop_add", "loop_convert", "pallas")):
                kinds += [self.fill, self.cub, self.sort, self.cudnn]
            found.append(self.rng.choice(kinds)())
            if self.rng.random() < 0.15 and found[-1].name.startswith("loop_multiply"):
                found += [*self.copies(), self.fusion()]
        return found


def made_module(seed: int, length: int = 40) -> tuple[str, list[list[Made]]]:
    """A program with a loop: its text, and the instructions of its entry and of the loop's body."""
    maker = Maker(seed)
    entry, body = maker.schedule(length), maker.schedule(length)
    return module_text(maker, entry, body), [entry, body]


def module_text(maker: Maker, entry: list[Made], body: list[Made]) -> str:
    lines = ["HloModule jit_train_step, is_scheduled=true\n"]
    lines.append("%less (a: f32[], b: f32[]) -> pred[] {\n  %a = f32[] parameter(0)\n  %b = f32[] parameter(1)")
    lines.append("  ROOT %lt = pred[] compare(%a, %b), direction=LT\n}\n")
    lines.append("%sum (a2: f32[], b2: f32[]) -> f32[] {\n  %a2 = f32[] parameter(0)\n  %b2 = f32[] parameter(1)")
    lines.append("  ROOT %s = f32[] add(%a2, %b2)\n}\n")
    lines += maker.called
    lines.append("%condition (p: f32[8]) -> pred[] {\n  %p = f32[8]{0} parameter(0)\n  ROOT %c = pred[] constant(true)\n}\n")
    for opening, made, ending in (
        ("%body (p: f32[8]) -> f32[8] {", body, []),
        (
            "ENTRY %main (p: f32[8]) -> f32[8] {",
            entry,
            ['%loop = f32[8]{0} while(%p), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"3"}}'],
        ),
    ):
        lines += [opening, "  %p = f32[8]{0} parameter(0)", *(f"  {each.text}" for each in made), *(f"  {text}" for text in ending)]
        lines.append(f"  ROOT %{'out' if ending else 'next'} = f32[8]{{0}} bitcast(%p)\n}}\n")
    return "\n".join(lines)


def launched(made: list[Made]) -> list[tuple[str, str]]:
    """(kernel, instruction) of each kernel, in order."""
    return [(kernel_name, each.name) for each in made for kernel_name in each.kernels]


def stretch(rng: random.Random, made: list[Made]) -> list[Made]:
    """Instructions of one graph: some in a row."""
    first = rng.randrange(len(made) - 12)
    return made[first : first + rng.randint(12, 30)]


SEEDS = range(30)


@pytest.mark.parametrize("seed", SEEDS)
def test_stretches_of_made_schedules_are_recovered(seed):
    text, parts = made_module(seed)
    candidates = list(schedules(parse(text)))
    rng = random.Random(seed)
    for made in parts:
        for _ in range(4):
            true = launched(stretch(rng, made))
            found = align([name for name, _ in true], candidates)
            assert list(zip([name for name, _ in true], found, strict=True)) == true


def test_made_schedules_contain_every_kind_of_kernel():
    found = Counter(name for seed in SEEDS for made in made_module(seed)[1] for name, _ in launched(made))
    wanted = (
        "nvjet_sm90_tst_128x64",
        "splitKreduce",
        "Memset 0",
        "bprop",
        "cub::",
        "expert_matmul__",
        "sort_",
        "memcpy128",
        "nccl",
        "loop_",
    )
    assert all(sum(count for name, count in found.items() if part in name) >= 20 for part in wanted), found


@pytest.mark.parametrize("seed", SEEDS)
def test_kernels_that_fit_nothing_have_no_instruction_and_change_no_other(seed):
    text, parts = made_module(seed)
    candidates = list(schedules(parse(text)))
    rng = random.Random(seed)
    true: list[tuple[str, str | None]] = []
    for each in stretch(rng, rng.choice(parts)):
        true += [(f"somebody_elses_kernel_{rng.randint(0, 9)}", None)] * (rng.random() < 0.2)
        true += launched([each])
    assert align([name for name, _ in true], candidates) == [instruction for _, instruction in true]


@pytest.mark.parametrize("call", ["cudnn", "cub", "pallas", "cublas"])
@pytest.mark.parametrize("begin", range(4))
def test_the_kernels_of_a_call_go_to_one_call_where_a_graph_begins_or_ends_beside_another(call, begin):
    maker = Maker(begin)
    calls = [getattr(maker, call)() for _ in range(4)]
    made = [each for one in calls for each in (maker.fusion(), one)] + [maker.fusion()]
    candidates = list(schedules(parse(module_text(maker, made, [maker.fusion()]))))
    for first, end in ((2 * begin + 1, len(made)), (0, 2 * begin + 2)):  # begins or ends with a call
        true = launched(made[first:end])
        assert align([name for name, _ in true], candidates) == [instruction for _, instruction in true]


def test_a_launch_of_unknown_kernels_and_a_program_without_work_name_nothing():
    unknown = ["somebody_elses_kernel", "another"]
    assert align(unknown, list(schedules(parse(made_module(0)[0])))) == [None, None]
    assert align(unknown, []) == [None, None]


@pytest.mark.parametrize("seed", SEEDS[:8])
def test_launches_of_graphs_in_the_entry_and_in_a_loop_are_named_apart(seed, tmp_path):
    """Graphs are launched several times, some with an unknown kernel; their kernels run on two streams; others are in no graph."""
    text, (entry, body) = made_module(seed)
    rng = random.Random(seed)
    graphs = [
        ("command_buffer_3", stretch(rng, entry), 2),
        ("command_buffer_41", stretch(rng, body), 6),
        ("command_buffer", stretch(rng, entry), 2),
    ]
    launches = [(graph, made) for graph, made, count in graphs for _ in range(count)]
    rng.shuffle(launches)
    streams, launch_calls, true, now = {1: [], 2: []}, [], [], 10
    for correlation, (graph, made) in enumerate(launches, 1):
        launch_calls.append(event("cuGraphLaunch", correlation, correlation + 0.5, correlation_id=correlation))
        kernels: list[tuple[str, str]] = launched(made)
        if rng.random() < 0.5:
            kernels.append(("somebody_elses_kernel", graph))
        own = range(now, now + 6 * len(kernels), 6)
        for start, (name, instruction) in zip(own, kernels, strict=True):
            streams[rng.choice((1, 2))].append(kernel(name, start, start + 3, graph, correlation, cuda_graph_id=1))
            true.append((start, instruction))
        outside = rng.choice([each for each in entry if each.name.startswith("loop_")])
        streams[1].append(kernel("loop_of_its_own", own.stop, own.stop + 1, outside.name, 1000 + correlation))
        true.append((own.stop, outside.name))
        now = own.start + 1 if correlation % 2 else max(start for start, _ in true) + 6  # two launches run at once
    last = max(start for start, _ in true) + 6
    planes = [gpu(0, {f"Stream #{number}(Compute)": events for number, events in streams.items()})]
    planes.append(host({"python": [step(0, 0, last)], "Host Threads/7": launch_calls}))
    (tmp_path / "jit_train_step.hlo.txt").write_text(text)
    found = load_profile(find_capture(write(tmp_path / "node.xplane.pb", planes))).hosts[0].host
    ops, zero = found.devices[0].ops, found.devices[0].ops.start[0]
    ours = [
        (round(start / 1e6), "" if op == MISSING else found.strings[op])
        for start, op in zip((ops.start - zero).tolist(), ops.op.tolist(), strict=True)
    ]
    assert ours == [(start - 10, instruction) for start, instruction in sorted(true)]


def test_a_graph_without_a_program_keeps_its_name(tmp_path):
    events = [kernel("loop_add_fusion", 0, 5, "command_buffer_3", 1), kernel("nvjet_sm90", 6, 9, "command_buffer_3", 1)]
    found = load_profile(find_capture(write(tmp_path / "node.xplane.pb", [gpu(0, {"Stream #1(Compute)": events})]))).hosts[0].host
    assert [found.strings[op] for op in found.devices[0].ops.op] == ["command_buffer_3"] * 2
