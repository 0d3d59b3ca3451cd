"""Import of files of torch's profiler, whose library is called Kineto: from their events to a `Trace`."""
