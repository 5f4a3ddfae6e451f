"""Records a running server, piece by piece: whatever ends it early leaves what there is."""

from __future__ import annotations

import time
from collections.abc import Callable

import httpx
from msgspec.structs import replace

from fullbore.errors import RecordingError
from fullbore.telemetry.recording import Timeline, check_follows, decode_timeline, join

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
    """Follows a source, and keeps what it has heard so far."""

    def __init__(self, source: TimelineSource) -> None:
        self._source = source
        self._parts: list[Timeline] = []
        self._longest_s = 0.0

    @property
    def timeline(self) -> Timeline | None:
        """What has been recorded so far; None before the first answer."""
        if not self._parts:
            return None
        whole = replace(self._parts[-1], recording=join([part.recording for part in self._parts]))
        return _cut(whole, self._longest_s)

    def record(self, seconds: float, on_progress: OnProgress = lambda recorded_s: None) -> None:
        """Records the next `seconds`; calls `on_progress` with the seconds so far. May be interrupted anywhere.

        Raises:
            RecordingError: the server cannot be asked (any more); `timeline` has what came before.
        """
        self._longest_s = seconds
        first = self._source.fetch(0.0)  # the moment at which the recording begins, and what led to it
        self._parts = [first]
        on_progress(0.0)
        end_s = time.monotonic() + seconds
        recorded_s = 0.0
        while recorded_s < seconds and time.monotonic() < end_s + _GRACE_S:
            time.sleep(max(min(POLL_S, end_s - time.monotonic()), 0.1))
            news = self._source.fetch(seconds, self._parts[-1].recording.end_ns)
            check_follows(self._parts[-1].recording, news.recording)
            self._parts.append(news)
            recorded_s = (news.recording.end_ns - first.recording.start_ns) * 1e-9
            on_progress(min(recorded_s, seconds))


def _cut(timeline: Timeline, seconds: float) -> Timeline:
    """Ends the window where it was to end."""
    recording = timeline.recording
    end_ns = min(recording.end_ns, recording.start_ns + round(seconds * 1e9))
    captured_unix_s = timeline.captured_unix_s - (recording.end_ns - end_ns) * 1e-9
    return replace(timeline, captured_unix_s=captured_unix_s, recording=replace(recording, end_ns=end_ns))
