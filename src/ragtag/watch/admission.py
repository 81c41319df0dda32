"""Who may see a run's page: whoever has its token, asking by a name that can only mean this machine.

The one idea: this stands before the whole application, so that no route can forget it. The token comes once in the
address and is a cookie from then on, which other sites' pages can neither read nor send.
"""

import hashlib
import ipaddress
import secrets
import socket
from http.cookies import CookieError, SimpleCookie

from starlette.datastructures import Headers, MutableHeaders, QueryParams
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_NO_TOKEN = (
    "This page needs its token: open the whole address that `ragtag launch` or `ragtag watch --web` has printed.\n"
)
_SAFE = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Admission:
    """Passes requests on to `application` that bear `token`, as a cookie or as `Authorization: Bearer`."""

    def __init__(self, application: ASGIApp, token: str) -> None:
        self._application, self._token = application, token
        # Cookies are the same on all ports: two runs' must not have one name.
        self._cookie = f"ragtag_{hashlib.sha256(token.encode()).hexdigest()[:12]}"
        name = socket.gethostname().lower()
        self._names = {"localhost", name, name.partition(".")[0], f"{name}.local"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            return

        async def send_safely(sent: Message) -> None:
            if sent["type"] == "http.response.start":
                MutableHeaders(scope=sent).update(_SAFE)
            await send(sent)

        response = self._refusal(scope)
        await (self._application if response is None else response)(scope, receive, send_safely)

    def _refusal(self, scope: Scope) -> Response | None:
        """Return what is answered instead of passing the request on; None: it is passed on."""
        headers, query = Headers(scope=scope), QueryParams(scope["query_string"])
        if not self._is_here(headers.get("host", "")):
            said = "This page is served under this machine's own name and addresses only, not as the host asked for.\n"
            return PlainTextResponse(said, status_code=421)
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("This page can be looked at, and nothing else.\n", status_code=405)
        if "token" in query:
            if not self._is_token(query["token"]):
                return PlainTextResponse(_NO_TOKEN, status_code=403)
            response = RedirectResponse(scope["path"], status_code=303)
            response.set_cookie(self._cookie, self._token, httponly=True, samesite="strict", path="/")
            return response
        if self._is_token(_cookie(headers.get("cookie", ""), self._cookie)) or self._is_token(
            headers.get("authorization", "").removeprefix("Bearer ")
        ):
            return None
        response = PlainTextResponse(_NO_TOKEN, status_code=403)
        if headers.get("sec-fetch-site") == "cross-site" and scope["path"] == "/":
            # A link on another site led here: only a request that this page makes itself brings the cookie.
            response.headers["Refresh"] = "0; url=/"
        return response

    def _is_token(self, given: str) -> bool:
        return secrets.compare_digest(given.encode(), self._token.encode())

    def _is_here(self, host: str) -> bool:
        """Whether no other site's name can stand in `host`: one that a stranger lets point here (DNS rebinding)."""
        name = host.rpartition("]")[0].removeprefix("[") if host.startswith("[") else host.partition(":")[0]
        if name.lower() in self._names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def _cookie(header: str, name: str) -> str:
    try:
        found = SimpleCookie(header).get(name)
    except CookieError:
        return ""
    return "" if found is None else found.value
