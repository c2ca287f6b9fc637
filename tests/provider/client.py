"""Drives the provider's simulator with the provider's own Python library.

The argument names the part to run: lifecycle, errors or rate_limit. The objects and the pagination in each successful
response are compared with the library's domain classes. If an object has a field that the library does not know, or
lacks one of the library's fields, the simulator has a defect, except for the fields listed below.
"""

import ipaddress
import json
import os
import sys
import urllib.request
from datetime import datetime, timedelta, timezone
from decimal import Decimal

from hcloud import APIException, Client
from hcloud.actions import Action, ActionFailedException
from hcloud.core.domain import Pagination
from hcloud.images import Image
from hcloud.locations import Location
from hcloud.server_types import ServerType
from hcloud.servers import Server, ServerCreatePublicNetwork
from hcloud.servers.domain import IPv4Address, IPv6Network

# Documented fields that the library does not read.
UNREAD_FIELDS = {
    Server: {"load_balancers"},
    Image: {"deleted"},
    IPv4Address: {"id"},
    IPv6Network: {"id"},
}
# Fields that the library reads from older responses, or computes.
ABSENT_FIELDS = {ServerType: {"included_traffic"}, IPv6Network: {"network", "network_mask"}}


def client(retries=0):
    created = Client(
        token=os.environ["HCLOUD_TOKEN"],
        api_endpoint=os.environ["HCLOUD_ENDPOINT"],
        poll_interval=0.02,
        poll_max_retries=500,
        timeout=20,
    )
    created._client._retry_max_retries = retries
    created._client._session.hooks["response"].append(check_response)
    return created


class Responses:
    last = None


def check_response(response, *args, **kwargs):
    Responses.last = response
    assert len(response.headers["X-Correlation-Id"]) >= 16, dict(response.headers)
    limit, remaining, reset = (
        int(response.headers[name]) for name in ("RateLimit-Limit", "RateLimit-Remaining", "RateLimit-Reset")
    )
    now = datetime.now(timezone.utc).timestamp()
    assert 0 <= remaining <= limit and now - 2 < reset < now + 2 * 3600, dict(response.headers)
    if response.ok:
        check_fields(response.json())


def check_fields(body):
    if "server" in body:
        check_server(body["server"])
    for server in body.get("servers", []):
        check_server(server)
    for action in [body.get("action")] + body.get("next_actions", []) + body.get("actions", []):
        if action is not None:
            assert_same_fields(action, Action)
            for resource in action["resources"]:
                assert set(resource) == {"id", "type"}, resource
    for server_type in body.get("server_types", []):
        assert_same_fields(server_type, ServerType)
    for location in body.get("locations", []):
        assert_same_fields(location, Location)
    for image in body.get("images", []):
        assert_same_fields(image, Image)
    if "meta" in body:
        assert_same_fields(body["meta"]["pagination"], Pagination)


def check_server(server):
    assert_same_fields(server, Server)
    assert_same_fields(server["server_type"], ServerType)
    assert_same_fields(server["location"], Location)
    assert_same_fields(server["image"], Image)
    net = server["public_net"]
    assert set(net) == {"ipv4", "ipv6", "floating_ips", "firewalls"}, net
    if net["ipv4"]:
        assert_same_fields(net["ipv4"], IPv4Address)
    if net["ipv6"]:
        assert_same_fields(net["ipv6"], IPv6Network)
    assert set(server["protection"]) == {"delete", "rebuild"}, server["protection"]


def assert_same_fields(value, kind):
    expected = set(kind.__api_properties__)
    unknown = set(value) - expected - UNREAD_FIELDS.get(kind, set())
    missing = expected - set(value) - ABSENT_FIELDS.get(kind, set())
    assert not unknown and not missing, f"{kind.__name__}: unknown {unknown}, missing {missing}"


def typed(kind, value):
    # In Python, a bool is an int.
    assert type(value) is kind, f"{value!r} is not a {kind.__name__}"
    return value


def assert_recent(at):
    now = datetime.now(timezone.utc)
    assert typed(datetime, at).tzinfo is not None and now - timedelta(minutes=5) < at <= now + timedelta(seconds=2), at


def control(method, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(os.environ["CONTROL_URL"] + path, data, method=method)
    request.add_header("Content-Type", "application/json")
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=20) as response:
        return json.load(response)


def fail_next(method, path, fault):
    control("POST", "/faults", {"method": method, "pathContains": path, "times": 1, "fault": fault})


def create_server(cloud, name, **changes):
    fields = {
        "name": name,
        "server_type": ServerType(name="cpx22"),
        "image": Image(name="debian-12"),
        "location": Location(name="nbg1"),
        "labels": {"slot": "a", "svc.example/machine": name},
        "user_data": "#cloud-config\n{}",
    }
    return cloud.servers.create(**{**fields, **changes})


def wait_for_actions(response):
    for action in [response.action] + response.next_actions:
        action.wait_until_finished()


def check_values(server, name):
    """Checks that the domain object of a running server and its parts have values of the right types."""
    assert (typed(int, server.id) > 0, server.name, server.status) == (True, name, Server.STATUS_RUNNING)
    assert_recent(server.created)
    kind = server.server_type
    assert (kind.name, typed(int, kind.cores), typed(float, kind.memory), typed(int, kind.disk)) == ("cpx22", 2, 4.0, 80)
    assert (kind.storage_type, kind.cpu_type, kind.architecture) == ("local", "shared", "x86")
    assert typed(str, kind.category) and typed(str, kind.description)
    offer = next(offer for offer in kind.locations if offer.location.name == "nbg1")
    assert (offer.available, offer.deprecation, typed(bool, offer.recommended)) == (True, None, True)
    price = next(price for price in kind.prices if price["location"] == "nbg1")
    assert Decimal(typed(str, price["price_monthly"]["net"])) > Decimal(typed(str, price["price_hourly"]["gross"])) > 0
    image = server.image
    assert (image.name, image.type, image.status) == ("debian-12", "system", "available")
    assert (image.os_flavor, image.os_version, image.architecture) == ("debian", "12", "x86")
    assert typed(datetime, image.created).year >= 2023 and image.protection == {"delete": False}
    location = server.location
    assert (location.name, location.country, location.city, location.network_zone) == ("nbg1", "DE", "Nuremberg", "eu-central")
    assert 49 < typed(float, location.latitude) < 50 and 11 < typed(float, location.longitude) < 12
    net = server.public_net
    assert ipaddress.IPv4Address(net.ipv4.ip).is_loopback and net.ipv4.blocked is False
    assert net.ipv4.ip in typed(str, net.ipv4.dns_ptr)
    assert ipaddress.IPv6Network(net.ipv6.ip).prefixlen == 64 and net.ipv6.dns_ptr == []
    assert len({server.id, typed(int, net.primary_ipv4.id), typed(int, net.primary_ipv6.id)}) == 3
    assert (net.floating_ips, net.firewalls, server.private_net, server.volumes) == ([], [], [], [])
    assert server.protection == {"delete": False, "rebuild": False}
    assert server.labels == {"slot": "a", "svc.example/machine": name}
    assert (server.primary_disk_size, server.locked, server.rescue_enabled) == (80, False, False)
    assert (server.iso, server.backup_window, server.placement_group) == (None, None, None)
    assert typed(int, server.included_traffic) > typed(int, server.outgoing_traffic) == typed(int, server.ingoing_traffic) == 0


def lifecycle():
    cloud = client()
    assert cloud.servers.get_all() == []
    created = create_server(cloud, "a-0")
    assert (created.server.status, created.server.locked) == (Server.STATUS_INIT, True)
    assert (created.action.command, [action.command for action in created.next_actions]) == ("create_server", ["start_server"])
    assert len(typed(str, created.root_password)) >= 16
    wait_for_actions(created)
    assert_recent(created.action.started)
    assert_recent(created.action.finished)
    assert (created.action.status, created.action.progress, created.action.error) == ("success", 100, None)
    assert created.action.resources == [{"id": created.server.id, "type": "server"}]
    for server in (cloud.servers.get_by_id(created.server.id), cloud.servers.get_by_name("a-0")):
        check_values(server, "a-0")
    listed = {action.id: action.command for action in server.get_actions(status=["success"])}
    assert listed == {created.action.id: "create_server", created.next_actions[0].id: "start_server"}, listed

    # A server created by type id and image id, in the default location, powered off, and without an IPv4 address.
    kind, image = cloud.server_types.get_by_name("cpx22"), cloud.images.get_by_id(server.image.id)
    changes = {"server_type": kind, "image": image, "location": None, "start_after_create": False, "labels": {}}
    net = ServerCreatePublicNetwork(enable_ipv4=False, enable_ipv6=True)
    private = create_server(cloud, "b-0", public_net=net, **changes)
    assert private.next_actions == []
    wait_for_actions(private)
    private = cloud.servers.get_by_id(private.server.id)
    assert (private.status, private.public_net.ipv4, private.labels) == (Server.STATUS_OFF, None, {})
    assert private.location.name == "fsn1" and private.public_net.ipv6 is not None

    # Pagination, and searches by label, status and name.
    for number in range(1, 5):
        wait_for_actions(create_server(cloud, f"a-{number}"))
    page = cloud.servers.get_list(page=2, per_page=2)
    assert len(page.servers) == 2
    pagination = page.meta.pagination
    assert (pagination.previous_page, pagination.next_page, pagination.last_page, pagination.total_entries) == (1, 3, 3, 6)
    links = Responses.last.links
    assert links["next"]["url"].endswith("page=3&per_page=2") and links["prev"] and links["last"], links
    first = cloud.servers.get_list(per_page=1).meta.pagination
    assert (first.page, first.previous_page, first.last_page) == (1, None, 6)
    assert len(cloud.servers.get_all()) == 6
    assert len(cloud.servers.get_all(label_selector="slot in (a,b),svc.example/machine!=a-1")) == 4
    assert [found.name for found in cloud.servers.get_all(status=["off", "stopping"])] == ["b-0"]
    assert cloud.servers.get_by_name("a-9") is None

    # Power and type.
    server.shutdown().wait_until_finished()
    server.power_off().wait_until_finished()
    server.reload()
    assert server.status == Server.STATUS_OFF
    server.change_type(ServerType(name="cpx32"), upgrade_disk=False).wait_until_finished()
    server.reload()
    assert (server.server_type.name, server.server_type.disk, server.primary_disk_size) == ("cpx32", 160, 80)
    for start_action in (server.power_on, server.reboot, server.reset):
        start_action().wait_until_finished()
    server.reload()
    assert server.status == Server.STATUS_RUNNING
    assert server.update(labels={"slot": "b"}).labels == {"slot": "b"}

    # An action that fails at the provider.
    fail_next("POST", "/actions/poweroff", {"kind": "actionError"})
    failing = server.power_off()
    try:
        failing.wait_until_finished()
        raise AssertionError("the failed action was not reported")
    except ActionFailedException as failed:
        assert failed.action.error == {"code": "action_failed", "message": "Action failed"}, failed.action.error
        assert_recent(failed.action.finished)

    # The catalog.
    assert [kind.name for kind in cloud.server_types.get_all()] == ["cpx12", "cpx22", "cpx32", "cpx42", "cpx52"]
    assert cloud.server_types.get_by_id(kind.id).name == "cpx22"
    assert cloud.server_types.get_list(per_page=2, page=2).server_types[0].name == "cpx32"
    assert cloud.locations.get_by_name("hel1").city == "Helsinki" and len(cloud.locations.get_all()) == 6
    assert cloud.locations.get_by_id(4).name == "ash"
    assert cloud.images.get_by_name_and_architecture("debian-13", "x86").os_version == "13"

    for server in cloud.servers.get_all():
        deleted = server.delete()
        deleted.wait_until_finished()
        assert deleted.command == "delete_server" and deleted.status == "success"
    assert cloud.servers.get_all() == []


def assert_refused(code, status, call):
    try:
        call()
    except APIException as error:
        assert (error.code, Responses.last.status_code) == (code, status), (error, Responses.last.status_code)
        assert typed(str, error.message) and error.correlation_id == Responses.last.headers["X-Correlation-Id"]
        return error.details
    raise AssertionError(f"{code} was expected")


def errors():
    cloud = client()
    created = create_server(cloud, "a")
    server = created.server
    assert assert_refused("uniqueness_error", 409, lambda: create_server(cloud, "a")) == {"fields": [{"name": "name"}]}
    assert_refused("locked", 423, server.power_off)
    assert_refused("locked", 423, server.delete)
    wait_for_actions(created)

    wait_for_actions(create_server(cloud, "b"))
    assert "limits" in assert_refused("resource_limit_exceeded", 403, lambda: create_server(cloud, "c"))
    cloud.servers.get_by_name("b").delete().wait_until_finished()

    server.change_protection(delete=True, rebuild=True).wait_until_finished()
    server.reload()
    assert server.protection == {"delete": True, "rebuild": True}
    assert_refused("protected", 423, server.delete)
    assert_refused("invalid_input", 422, lambda: server.change_protection(delete=False, rebuild=True))
    server.change_protection(delete=False, rebuild=False).wait_until_finished()

    assert_refused("server_not_stopped", 422, lambda: server.change_type(ServerType(name="cpx32"), upgrade_disk=False))
    server.power_off().wait_until_finished()
    assert_refused("invalid_server_type", 422, lambda: server.change_type(ServerType(name="cpx12"), upgrade_disk=False))
    assert_refused("invalid_input", 422, lambda: server.change_type(ServerType(name="cx1"), upgrade_disk=False))

    for field, bad in {
        "name": {"name": "not a host name"},
        "server_type": {"server_type": ServerType(name="cx1")},
        "image": {"image": Image(name="debian-1")},
        "location": {"location": Location(name="moon1")},
        "labels": {"labels": {"hetzner.cloud/a": "b"}},
        "user_data": {"user_data": "x" * (32 * 1024 + 1)},
    }.items():
        details = assert_refused("invalid_input", 422, lambda: create_server(cloud, **{"name": "d", **bad}))
        assert details["fields"][0]["name"] == field and details["fields"][0]["messages"], details
    assert_refused("invalid_input", 422, lambda: cloud.servers.get_all(label_selector="a in b"))
    assert_refused("invalid_input", 422, lambda: cloud.servers.get_list(page="x"))
    assert_refused("invalid_input", 422, lambda: cloud.request("POST", "/servers", json={"name": "d"}))
    assert_refused("invalid_input", 422, lambda: cloud.request("GET", "/actions"))
    assert_refused("json_error", 400, lambda: cloud.request("POST", "/servers", data="{"))

    assert_refused("not_found", 404, lambda: cloud.servers.get_by_id(1))
    assert_refused("not_found", 404, lambda: cloud.servers.get_by_id("a"))
    assert_refused("not_found", 404, lambda: cloud.actions.get_by_id(1))
    assert_refused("not_found", 404, lambda: cloud.images.get_by_id(1))
    assert_refused("not_found", 404, lambda: cloud.request("GET", "/no_such_route"))
    assert_refused("method_not_allowed", 405, lambda: cloud.request("PATCH", "/servers"))
    removed = assert_refused("deprecated_api_endpoint", 410, lambda: cloud.request("GET", "/datacenters"))
    assert removed["announcement"].startswith("https://docs.hetzner.cloud/changelog#"), removed

    unauthorized = client()
    unauthorized._client._headers["Authorization"] = "Bearer wrong"
    assert_refused("unauthorized", 401, unauthorized.servers.get_all)

    # The simulator's state cannot cause these errors, so they are injected as faults.
    for status, code in [(412, "placement_error"), (412, "resource_unavailable"), (403, "maintenance"),
                         (409, "conflict"), (500, "server_error"), (503, "unavailable"), (504, "timeout")]:
        fail_next("POST", "/servers", {"kind": "status", "status": status, "code": code})
        assert_refused(code, status, lambda: create_server(cloud, "e"))
    assert cloud.servers.get_by_name("e") is None

    fault = {"kind": "status", "status": 429, "code": "rate_limit_exceeded", "resetInSeconds": 30}
    fail_next("GET", "/servers", fault)
    assert_refused("rate_limit_exceeded", 429, cloud.servers.get_all)
    headers = Responses.last.headers
    wait = int(headers["RateLimit-Reset"]) - datetime.now(timezone.utc).timestamp()
    assert headers["RateLimit-Remaining"] == "0" and 25 < wait <= 31, dict(headers)


def rate_limit():
    cloud = client()
    remaining = []
    for _ in range(3):
        cloud.servers.get_list()
        assert Responses.last.headers["RateLimit-Limit"] == "3"
        remaining.append(int(Responses.last.headers["RateLimit-Remaining"]))
    assert remaining == sorted(remaining, reverse=True) and remaining[0] == 2, remaining
    while Responses.last.status_code != 429:
        try:
            cloud.servers.get_list()
        except APIException as error:
            assert error.code == "rate_limit_exceeded", error
    assert Responses.last.headers["RateLimit-Remaining"] == "0"
    # The library retries a refused call after a delay, as the provider recommends.
    retrying = client(retries=5)
    for _ in range(3):
        retrying.servers.get_list()


{"lifecycle": lifecycle, "errors": errors, "rate_limit": rate_limit}[sys.argv[1]]()
