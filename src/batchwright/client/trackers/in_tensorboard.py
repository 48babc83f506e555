"""TensorBoard: event files, with predictions in a second run beside the measured one."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from batchwright.client.trackers.following import TrackedRun
from batchwright.client.trackers.points import PREDICTED, markdown_table
from batchwright.storage.files import write_whole

_DT_STRING = 7
_OWNER = "run.id"


class _TensorBoard:
    def __init__(self, folder: Path, run: TrackedRun) -> None:
        self._folder, self._after = folder, run.after
        self._measured = self._writer(folder)
        self._predicted: EventFileWriter | None = None
        if run.after < 0:
            text = markdown_table(run.facts).encode()
            data = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
            shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
            tensor = TensorProto(dtype=_DT_STRING, string_val=[text], tensor_shape=shape)
            value = Summary.Value(tag="plan", metadata=data, tensor=tensor)
            self._measured.add_event(Event(wall_time=time.time(), summary=Summary(value=[value])))

    def _writer(self, folder: Path) -> EventFileWriter:
        writer = EventFileWriter(str(folder))
        # TensorBoard leaves out steps from here on that an earlier process wrote: one that was
        # killed, or ran out of disk, before it wrote trackers.json.
        begin = SessionLog(status=SessionLog.START)
        writer.add_event(Event(wall_time=time.time(), step=self._after + 1, session_log=begin))
        return writer

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log values; predictions under the name of the measured value, in a run of their own, so
        that one chart shows both.
        """
        measured = {name: value for name, value in values.items() if name not in PREDICTED}
        predicted = {PREDICTED[name]: values[name] for name in values if name in PREDICTED}
        self._add(self._measured, step, measured)
        if predicted:
            self._predicted = self._predicted or self._writer(self._folder / "predicted")
            self._add(self._predicted, step, predicted)

    def _add(self, writer: EventFileWriter, step: int, values: Mapping[str, float]) -> None:
        some = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=some)))

    def flush(self) -> None:
        self._measured.flush()
        if self._predicted is not None:
            self._predicted.flush()

    def close(self, outcome: str) -> None:
        del outcome
        self._measured.close()
        if self._predicted is not None:
            self._predicted.close()


def open_tracker(place: str, run: TrackedRun) -> _TensorBoard:
    """Event files in a folder of this run; with a part of the run's identifier behind its name
    where another run, or anything else, has that folder.
    """
    folder = Path(place) / run.name if place else run.folder / "tensorboard"
    if folder.exists() and any(folder.iterdir()):
        owner = folder / _OWNER
        if not owner.exists() or owner.read_text() != run.id:
            folder = folder.with_name(f"{folder.name}-{run.id[:8]}")
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / _OWNER, run.id.encode())  # half of it would be another run's
    return _TensorBoard(folder, run)
