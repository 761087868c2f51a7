"""A tiny MCP server on standard input and output, with one tool. Runs in a sandbox, so it needs nothing but Python."""

import json
import sys

TOOL = {
    "name": "polar_probe",
    "description": "Tells the secret word.",
    "inputSchema": {"type": "object", "properties": {}},
}


def answer(method: str, params: dict) -> dict:
    if method == "initialize":
        version = params.get("protocolVersion", "2025-06-18")
        return {
            "protocolVersion": version,
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "probe", "version": "1"},
        }
    if method == "tools/list":
        return {"tools": [TOOL]}
    if method == "tools/call":
        return {"content": [{"type": "text", "text": "The secret word is xylophone."}]}
    return {}


for line in sys.stdin:
    request = json.loads(line)
    if "id" in request:
        reply = {
            "jsonrpc": "2.0",
            "id": request["id"],
            "result": answer(request["method"], request.get("params") or {}),
        }
        print(json.dumps(reply), flush=True)
