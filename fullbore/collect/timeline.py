"""Records a running server, piece by piece: whatever ends it early leaves what there is."""

from __future__ import annotations

import time
from collections.abc import Callable

import httpx
from msgspec.structs import replace

from fullbore.errors import RecordingError
from fullbore.telemetry.recording import Timeline, decode_timeline, join

POLL_S = 0.5
_TIMEOUT_S = 10.0
_GRACE_S = 5.0  # a step that began in the window may end so much later

OnProgress = Callable[[float], None]


class TimelineSource:
    """The /timeline of a fullbore server."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """`url`: http://host:port; nothing is fetched yet."""
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.url = url.rstrip("/").removesuffix("/v1")
        try:
            self._http = httpx.Client(base_url=self.url, headers=headers, timeout=_TIMEOUT_S)
        except httpx.InvalidURL as error:
            raise RecordingError(
                f"--url {url} is not a URL ({error}); give one such as http://127.0.0.1:8000."
            ) from None

    def fetch(self, seconds: float, since_ns: int | None = None) -> Timeline:
        """The last `seconds`, or all since `since_ns`.

        Raises:
            RecordingError: no server there, not a fullbore server, wrong key, or an error of the server's.
        """
        params = {"seconds": str(seconds)} if since_ns is None else {"since_ns": str(since_ns)}
        try:
            response = self._http.get("/timeline", params=params)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise RecordingError(f"{self.url} does not answer ({error or type(error).__name__}).") from None
        if response.status_code == 401:
            raise RecordingError(f"{self.url} wants an API key; give it with --api-key or FULLBORE_API_KEY.")
        if response.status_code != 200:
            raise RecordingError(f"{self.url}/timeline answered {response.status_code}; is it a fullbore server?")
        return decode_timeline(response.content, f"{self.url}/timeline")

    def close(self) -> None:
        self._http.close()


class TimelineRecorder:
    """Follows a source; `timeline` is what has been recorded so far, None before the first answer."""

    def __init__(self, source: TimelineSource) -> None:
        self._source = source
        self.timeline: Timeline | None = None

    def record(self, seconds: float, on_progress: OnProgress = lambda recorded_s: None) -> None:
        """Records the next `seconds`; calls `on_progress` with the seconds so far. May be interrupted anywhere.

        Raises:
            RecordingError: the server cannot be asked (any more); `timeline` has what came before.
        """
        self.timeline = self._source.fetch(0.0)  # the moment at which the recording begins, and what led to it
        on_progress(0.0)
        end_s = time.monotonic() + seconds
        while self.timeline.window_s < seconds and time.monotonic() < end_s + _GRACE_S:
            time.sleep(max(min(POLL_S, end_s - time.monotonic()), 0.1))
            news = self._source.fetch(seconds, self.timeline.recording.end_ns)
            self.timeline = replace(news, recording=join(self.timeline.recording, news.recording))
            on_progress(min(self.timeline.window_s, seconds))
        self._cut(seconds)

    def _cut(self, seconds: float) -> None:
        """Ends the window where it was to end."""
        assert self.timeline is not None
        recording = self.timeline.recording
        end_ns = min(recording.end_ns, recording.start_ns + round(seconds * 1e9))
        captured_unix_s = self.timeline.captured_unix_s - (recording.end_ns - end_ns) * 1e-9
        self.timeline = replace(
            self.timeline, captured_unix_s=captured_unix_s, recording=replace(recording, end_ns=end_ns)
        )
