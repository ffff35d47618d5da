"""A stand-in for `vllm serve` that speaks the routes the engine uses, in milliseconds and without torch.

Its tokens depend on prompt, seed and the bytes that it was given, so a server which was not given them again would
answer otherwise. A file of orders in the working folder makes it misbehave: "hang 5" hangs on the fifth completion,
"exit 5" ends the process, "sick 5" fails every health check from then on and hangs; an order is obeyed once.
"""

import hashlib
import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

DIGEST = sys.argv[1]
ORDERS = Path(sys.argv[2])
STATE = {"served": None, "arriving": None, "sealed": None, "count": 0, "sick": False}
LOCK = threading.Lock()


def obey(kind):
    """Do what the orders say for this call of `kind`, once."""
    with LOCK:
        STATE["count"] += kind == "complete"
        orders = json.loads(ORDERS.read_text()) if ORDERS.exists() else []
        due = [o for o in orders if o[1] == kind and o[2] <= STATE["count"]]
        if not due:
            return
        orders.remove(due[0])
        ORDERS.write_text(json.dumps(orders))
    what = due[0][0]
    if what == "exit":
        os._exit(1)
    STATE["sick"] = what == "sick"
    time.sleep(3600)


def control(step, arguments):
    if step == "start_weight_update":
        STATE["arriving"], STATE["sealed"] = hashlib.sha256(), None
    elif step == "finish_weight_update":
        STATE["served"] = STATE["sealed"]
    else:
        info = arguments["update_info"]
        if "path" in info:
            obey("update")
            STATE["arriving"].update(Path(info["path"]).read_bytes())
        elif "manifest" in info:
            STATE["sealed"] = STATE["arriving"].hexdigest()
    return {"error": None}


def complete(body):
    obey("complete")
    source = json.dumps([body["prompt"], body["seed"], STATE["served"]]).encode()
    # 3..66: words of the tiny tokenizer, its end token not among them.
    tokens = [3 + byte % 64 for byte in hashlib.sha256(source).digest()[: body["max_tokens"]]]
    logprobs = {"token_logprobs": [-4 - t / 256 for t in tokens]}
    return {"choices": [{"token_ids": tokens, "logprobs": logprobs, "finish_reason": "length"}]}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(503 if STATE["sick"] else 200, {})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/collective_rpc":
            call, given = body["method"], body["kwargs"]
            if call == "lowbitrl_report":
                result = {"digest": DIGEST, "modules": {}}
            else:
                result = control(given["step"], given["arguments"])
            self.answer(200, {"results": [result]})
        elif self.path == "/v1/completions":
            self.answer(200, complete(body))
        else:
            self.answer(200, {})

    def answer(self, code, data):
        text = json.dumps(data).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *arguments):
        """Nothing."""


class Many(ThreadingHTTPServer):
    request_queue_size = 128


if __name__ == "__main__":
    if "RANK" in os.environ:
        sys.exit("a server is no rank of torchrun's, but it was told that it is one")
    port = int(sys.argv[sys.argv.index("--port") + 1])
    Many(("127.0.0.1", port), Handler).serve_forever()
