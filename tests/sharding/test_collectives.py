"""Collectives of a compiled step: devices however they are written, bytes, links, and refusals."""

import pytest

from ttcd_jax.sharding.collectives import Collective, collectives

MESH = {"data": 4, "fsdp": 2, "seq": 2, "tensor": 1}  # nodes of 4: data crosses
BODY = "%body (p: (s32[])) -> (s32[]) {{\n{}\n}}\n\n"
ENTRY = "ENTRY %main (x: f32[8]) -> f32[8] {{\n{}\n}}\n"


def _one(line, mesh=MESH, node_size=4):
    (found,) = collectives(ENTRY.format(line), mesh, node_size)
    return found


@pytest.mark.parametrize(
    ("groups", "axes", "nodes"),
    [
        ("[8,2]<=[16]", "seq", 1),
        ("[4,4]<=[4,4]T(1,0)", "data", 4),
        ("[8,2]<=[4,2,2]T(0,2,1)", "fsdp", 1),
        ("[2,8]<=[4,2,2]T(2,1,0)", "data x fsdp", 4),
        ("[1,16]<=[16]", "data x fsdp x seq", 4),
        ("{{0,1,2,3},{4,5,6,7},{8,9,10,11},{12,13,14,15}}", "fsdp x seq", 1),
        ("{{0,4},{1,5},{2,6},{3,7},{8,12},{9,13},{10,14},{11,15}}", "data", 2),
        ("mesh['data'=4,'fsdp'=2,'seq'=2,'tensor'=1] {'seq','data'}", "data x seq", 4),
        ("mesh['axis_0'=4,'axis_1'=4] {'axis_0'}", "data", 4),
        ("mesh['data'=16] {'data':(1)8}", "data x fsdp", 4),  # 0, 2, 4, and so on
        ("mesh['data'=16] {'data':(4)2}", "fsdp", 1),  # 0, 2
        ("mesh['axis_0'=8,'axis_1'=2] {'axis_0':(2)2,'axis_1'}", "data x seq", 2),  # 0, 1, 4, 5
    ],
)
def test_devices_are_found_however_they_are_written(groups, axes, nodes):
    line = f"  %r = bf16[6,8]{{1,0}} all-reduce(%x), channel_id=1, replica_groups={groups}"
    found = _one(line)
    assert (found.axes, found.nodes) == (axes, nodes)
    assert found.sent == 2 * 96 * (found.devices - 1) / found.devices
    assert found.crossing == (nodes / found.devices if nodes > 1 else 0)


@pytest.mark.parametrize(
    ("operation", "sent", "crossing"),
    [
        ("f32[16] all-gather(%x), replica_groups=[2,8]<=[16], dimensions={0}", 56, 2 / 8),
        ("f32[2] reduce-scatter(%x), replica_groups=[2,8]<=[16]", 56, 2 / 8),
        ("f32[16] all-to-all(%x), replica_groups=[2,8]<=[16]", 56, 4 / 7),
        ("(f32[8], s8[4]) all-to-all(%x, %y), replica_groups=[4,4]<=[16]", 27, 0),
        ("f32[12] all-to-all(%x), replica_groups=[2,6]<=[12]", 40, 8 / 15),  # four here, two there
        ("pred[16] collective-permute(%x), source_target_pairs={{0,1},{1,2},{2,3}}", 16, 0),
        ("f32[4] collective-permute(%x), source_target_pairs={{0,4},{4,8}}", 16, 1),
    ],
)
def test_a_device_sends_by_a_ring_or_to_all_others(operation, sent, crossing):
    found = _one(f"  %r = {operation}")
    assert (found.sent, found.crossing) == pytest.approx((sent, crossing))


def test_a_loop_counts_its_trips_and_what_is_computed_meanwhile():
    groups = "replica_groups=[4,4]<=[16], backend_config={}"
    start = f"  %s = (f32[4], f32[16]) all-gather-start(%x), {groups}"
    body = [start, "  %f = f32[8] fusion(%x), calls=%fused", "  %d = f32[16] all-gather-done(%s)"]
    trips = ', backend_config={"known_trip_count":{"n":"6"}}'
    loop = "  %w = (s32[]) while(%t), condition=%c, body=%body"
    alone = "  %a = f32[16] all-gather(%x), replica_groups=[16,1]<=[16]"
    text = (
        BODY.format("\n".join(body))
        + "%c (p: (s32[])) -> pred[] {\n}\n\n%fused (p: f32[8]) -> f32[8] {\n}\n\n"
    )
    (found,) = collectives(text + ENTRY.format(f"{alone}\n{loop}{trips}"), MESH, 4)
    assert found == Collective("all-gather", "fsdp x seq", "f32[16]", 4, 1, 48, 0, True, 6)
    text = text.replace(body[1] + "\n", "")
    assert not collectives(text + ENTRY.format(loop + trips), MESH, 4)[0].is_beside_work
    with pytest.raises(ValueError, match="a loop of unknown length"):
        collectives(text + ENTRY.format(loop), MESH, 4)


@pytest.mark.parametrize(
    "line",
    [
        "f32[4] all-reduce(%x), replica_groups={}",
        "f32[4] all-reduce(%x), replica_groups=mesh['data'=4,'fsdp'=4] {'fsdp':2}",
        "f32[4] all-reduce(%x), replica_groups=mesh['data'=16], device_ids=[4] {'data'}",
        "f32[4] ragged-all-to-all(%x), replica_groups=[4,4]<=[16]",
        "f32[4] send(%x), channel_id=1",
        "f32[4] all-gather-done(%x)",
        "f32[4] all-reduce(x.1), replica_groups=[4,4]<=[16]",
    ],
)
def test_what_cannot_be_counted_is_no_sum(line):
    with pytest.raises(ValueError, match=r"devices of|a collective"):
        _one(f"  %r = {line}")
