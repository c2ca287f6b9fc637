#!/usr/bin/env python3
"""Scripted stub of three model APIs, loopback only, no third-party modules:
     POST /v1/messages          (Anthropic Messages; SSE and plain)
     POST /v1/responses         (OpenAI Responses; SSE)
     POST /v1/chat/completions  (OpenAI Chat; SSE and plain)
   usage: stub.py SCRIPT.json PORTFILE REQLOG
   SCRIPT.json: {"tracks": {"main": [step, ...], "sub": [...]}}
   The track is the last "[[name]]" marker in a user text of the request; the
   step is the number of assistant turns after that marker, so the stub is
   stateless (except for "times").  The response to a request without a marker is
   "ok"; to a request without tools (to generate a title), it is "A title".
   step: {"text": "...", "thinking": "...", "tools": [{"name":..,"input":{..}}],
          "usage": {...}, "delay": seconds, "stop": "...", "model": "..." (Messages),
          "status": 500, "body": {...}, "headers": {...}, "times": 2 (after that, the
          step in "then" is used), "cut": true (drop the connection mid-stream),
          "hang": seconds after each part of a block (Messages),
          "failed": {...} (the error of a response that fails; Responses)}
   A tool call of Responses may have "custom": true or "namespace": "...".
"""
import json, re, sys, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SCRIPT = json.load(open(sys.argv[1]))
PORTFILE, REQLOG = sys.argv[2], sys.argv[3]
LOCK = threading.Lock()
SEQ = [0]
USED = {}
USAGE = {"input_tokens": 1000, "output_tokens": 200,
         "cache_creation_input_tokens": 3000, "cache_read_input_tokens": 5000}

def texts(content, skip_types=("tool_result",)):
    if isinstance(content, str):
        return content
    out = []
    for b in content or []:
        if isinstance(b, str):
            out.append(b)
        elif isinstance(b, dict) and b.get("type") not in skip_types:
            out.append(b.get("text") or "")
    return "\n".join(out)

def turns(body):
    """Returns [(role, text)] for a request in any of the three formats"""
    r = []
    items = body.get("messages") or body.get("input") or []
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    for m in items:
        t = m.get("type")
        if t in ("function_call", "custom_tool_call", "local_shell_call"):
            r.append(("assistant", "")); continue
        if t in ("reasoning",) or (t and t.endswith("_output")):
            r.append(("tool", "")); continue
        role = m.get("role", "?")
        r.append((role, texts(m.get("content")) if role == "user" else ""))
    return r

def pick(body):
    track, step, prev = None, 0, None
    for role, text in turns(body):
        if role == "user":
            found = re.findall(r"\[\[([a-z0-9_-]+)\]\]", text)
            found = [f for f in found if f in SCRIPT["tracks"]]
            if found:
                track, step = found[-1], 0
        if role == "assistant" and prev != "assistant" and track:
            step += 1
        prev = role
    if track is None:
        return None, 0, {"text": "ok"}
    steps = SCRIPT["tracks"][track]
    s = steps[min(step, len(steps) - 1)]
    while s.get("times"):
        with LOCK:
            k = (track, step, id(s)); USED[k] = USED.get(k, 0) + 1
            if USED[k] <= s["times"]:
                break
        s = s["then"]
    return track, step, s

class H(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *a): pass
    def plain(self, status, obj, headers=None):
        b = json.dumps(obj).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(b)))
        for k, v in (headers or {}).items(): self.send_header(k, v)
        self.end_headers(); self.wfile.write(b)
    def do_HEAD(self): self.plain(200, {})
    def do_GET(self):
        self.record({}, None, None)
        if self.path.startswith("/v1/models"):
            return self.plain(200, {"object": "list", "data": [{"id": "stub-model", "object": "model"}]})
        self.plain(404, {"error": {"type": "not_found_error", "message": "no"}})
    def record(self, body, track, step):
        with LOCK:
            SEQ[0] += 1
            n = SEQ[0]
            row = {"n": n, "t": round(time.time(), 3), "method": self.command, "path": self.path,
                   "model": body.get("model"), "stream": body.get("stream"), "track": track, "step": step,
                   "max_tokens": body.get("max_tokens"),
                   "tools": [t.get("name") or (t.get("function") or {}).get("name") or t.get("type") for t in body.get("tools") or []],
                   "headers": {k.lower(): v for k, v in self.headers.items()
                               if k.lower() not in ("authorization", "x-api-key", "host", "content-length", "accept-encoding", "connection")},
                   "last": (body.get("messages") or body.get("input") or [None])[-1]}
            if n > 1: row.pop("headers"); row["tools"] = len(row["tools"])
            with open(REQLOG, "a") as f: f.write(json.dumps(row) + "\n")
            with open(REQLOG + ".full", "a") as f: f.write(json.dumps({"n": n, "body": body}) + "\n")
            return n
    def do_POST(self):
        raw = self.rfile.read(int(self.headers.get("content-length") or 0))
        try: body = json.loads(raw or b"{}")
        except ValueError: body = {}
        p = self.path.split("?")[0]
        if p.endswith("/count_tokens"):
            self.record(body, None, None); return self.plain(200, {"input_tokens": 1234})
        if not (p.endswith("/messages") or p.endswith("/responses") or p.endswith("/chat/completions")):
            self.record(body, None, None)
            return self.plain(404, {"type": "error", "error": {"type": "not_found_error", "message": "no " + p}})
        track, step, s = pick(body)
        if not body.get("tools"): track, step, s = "(no tools)", 0, {"text": "A title"}      # such as a request to generate a title
        n = self.record(body, track, step)
        try:
            time.sleep(s.get("delay", 0))
            if "status" in s:
                return self.plain(s["status"], s.get("body", {}), s.get("headers"))
            if p.endswith("/messages"): self.a_messages(body, s, n)
            elif p.endswith("/responses"): self.a_responses(body, s, n)
            else: self.a_chat(body, s, n)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
    # --- SSE
    def sse_start(self, extra=None):
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("cache-control", "no-cache")
        self.send_header("connection", "close")
        for k, v in (extra or {}).items(): self.send_header(k, v)
        self.end_headers(); self.close_connection = True
    def sse(self, obj, event=None):
        if event: self.wfile.write(b"event: " + event.encode() + b"\n")
        self.wfile.write(b"data: " + (obj if isinstance(obj, str) else json.dumps(obj)).encode() + b"\n\n")
        self.wfile.flush()
    # --- Anthropic
    def a_messages(self, body, s, n):
        usage = dict(USAGE); usage.update(s.get("usage", {}))
        content = []
        if s.get("thinking"): content.append({"type": "thinking", "thinking": s["thinking"], "signature": "c3R1Yg=="})
        if s.get("text"): content.append({"type": "text", "text": s["text"]})
        for i, t in enumerate(s.get("tools", [])):
            content.append({"type": "tool_use", "id": "toolu_%02d_%02d" % (n, i), "name": t["name"], "input": t["input"]})
        stop = s.get("stop") or ("tool_use" if s.get("tools") else "end_turn")
        msg = {"id": "msg_%02d" % n, "type": "message", "role": "assistant", "model": s.get("model") or body.get("model"),
               "content": content, "stop_reason": stop, "stop_sequence": None, "usage": usage}
        rid = {"request-id": "req_%02d" % n}
        if not body.get("stream"): return self.plain(200, msg, rid)
        self.sse_start(rid)
        first = dict(msg, content=[], stop_reason=None, usage=dict(usage, output_tokens=1))
        self.sse({"type": "message_start", "message": first}, "message_start")
        for i, b in enumerate(content):
            start = {"text": {"type": "text", "text": ""},
                     "thinking": {"type": "thinking", "thinking": "", "signature": ""}}.get(b["type"]) or dict(b, input={})
            self.sse({"type": "content_block_start", "index": i, "content_block": start}, "content_block_start")
            if b["type"] == "text":
                t = b["text"]; h = max(1, len(t) // 2); ds = [{"type": "text_delta", "text": x} for x in (t[:h], t[h:]) if x]
            elif b["type"] == "thinking":
                ds = [{"type": "thinking_delta", "thinking": b["thinking"]}, {"type": "signature_delta", "signature": b["signature"]}]
            else:
                t = json.dumps(b["input"]); h = len(t) // 2
                ds = [{"type": "input_json_delta", "partial_json": x} for x in (t[:h], t[h:])]
            for k, d in enumerate(ds):
                self.sse({"type": "content_block_delta", "index": i, "delta": d}, "content_block_delta")
                if s.get("cut"): self.wfile.flush(); self.connection.close(); return
                if s.get("hang"): time.sleep(s["hang"])
            self.sse({"type": "content_block_stop", "index": i}, "content_block_stop")
        self.sse({"type": "message_delta", "delta": {"stop_reason": stop, "stop_sequence": None}, "usage": usage}, "message_delta")
        self.sse({"type": "message_stop"}, "message_stop")
    # --- OpenAI Responses
    def a_responses(self, body, s, n):
        rid = "resp_%02d" % n; out = []
        u = dict(USAGE); u.update(s.get("usage", {}))
        usage = {"input_tokens": u["input_tokens"] + u["cache_read_input_tokens"], "input_tokens_details": {"cached_tokens": u["cache_read_input_tokens"]},
                 "output_tokens": u["output_tokens"], "output_tokens_details": {"reasoning_tokens": 50},
                 "total_tokens": u["input_tokens"] + u["cache_read_input_tokens"] + u["output_tokens"]}
        base = {"id": rid, "object": "response", "created_at": int(time.time()), "model": body.get("model"), "status": "in_progress", "output": [], "usage": None}
        self.sse_start()
        self.sse({"type": "response.created", "response": base}, "response.created")
        if s.get("thinking"):
            it = {"type": "reasoning", "id": "rs_%02d" % n, "summary": [{"type": "summary_text", "text": s["thinking"]}], "encrypted_content": None}
            self.sse({"type": "response.output_item.done", "output_index": len(out), "item": it}, "response.output_item.done"); out.append(it)
        if s.get("text"):
            it = {"type": "message", "id": "msg_%02d" % n, "role": "assistant", "status": "completed", "content": [{"type": "output_text", "text": s["text"], "annotations": []}]}
            self.sse({"type": "response.output_item.added", "output_index": len(out), "item": dict(it, content=[], status="in_progress")}, "response.output_item.added")
            self.sse({"type": "response.output_text.delta", "item_id": it["id"], "output_index": len(out), "content_index": 0, "delta": s["text"]}, "response.output_text.delta")
            if s.get("cut"): self.connection.close(); return
            self.sse({"type": "response.output_item.done", "output_index": len(out), "item": it}, "response.output_item.done"); out.append(it)
        for i, t in enumerate(s.get("tools", [])):
            if t.get("custom"):
                it = {"type": "custom_tool_call", "id": "ctc_%02d_%02d" % (n, i), "call_id": "call_%02d_%02d" % (n, i), "name": t["name"], "input": t["input"], "status": "completed"}
            else:
                it = {"type": "function_call", "id": "fc_%02d_%02d" % (n, i), "call_id": "call_%02d_%02d" % (n, i), "name": t["name"], "arguments": json.dumps(t["input"]), "status": "completed"}
                if t.get("namespace"): it["namespace"] = t["namespace"]
            self.sse({"type": "response.output_item.added", "output_index": len(out), "item": it}, "response.output_item.added")
            self.sse({"type": "response.output_item.done", "output_index": len(out), "item": it}, "response.output_item.done"); out.append(it)
        if s.get("failed"):
            return self.sse({"type": "response.failed", "response": dict(base, status="failed", error=s["failed"])}, "response.failed")
        self.sse({"type": "response.completed", "response": dict(base, status="completed", output=out, usage=usage)}, "response.completed")
    # --- OpenAI Chat
    def a_chat(self, body, s, n):
        u = dict(USAGE); u.update(s.get("usage", {}))
        pt = u["input_tokens"] + u["cache_read_input_tokens"]
        usage = {"prompt_tokens": pt, "completion_tokens": u["output_tokens"], "total_tokens": pt + u["output_tokens"],
                 "prompt_tokens_details": {"cached_tokens": u["cache_read_input_tokens"]}}
        calls = [{"index": i, "id": "call_%02d_%02d" % (n, i), "type": "function",
                  "function": {"name": t["name"], "arguments": json.dumps(t["input"])}} for i, t in enumerate(s.get("tools", []))]
        fin = "tool_calls" if calls else "stop"
        base = {"id": "chatcmpl-%02d" % n, "created": int(time.time()), "model": body.get("model")}
        if not body.get("stream"):
            m = {"role": "assistant", "content": s.get("text") or None}
            if calls: m["tool_calls"] = calls
            return self.plain(200, dict(base, object="chat.completion", choices=[{"index": 0, "message": m, "finish_reason": fin}], usage=usage))
        self.sse_start(); base["object"] = "chat.completion.chunk"
        ch = lambda d, f=None: self.sse(dict(base, choices=[{"index": 0, "delta": d, "finish_reason": f}]))
        ch({"role": "assistant", "content": ""})
        if s.get("text"): ch({"content": s["text"]})
        for c in calls: ch({"tool_calls": [c]})
        ch({}, fin)
        self.sse(dict(base, choices=[], usage=usage)); self.sse("[DONE]")

srv = ThreadingHTTPServer(("127.0.0.1", 0), H)
srv.daemon_threads = True
open(PORTFILE + ".tmp", "w").write(str(srv.server_address[1]))
import os; os.rename(PORTFILE + ".tmp", PORTFILE)
srv.serve_forever()
