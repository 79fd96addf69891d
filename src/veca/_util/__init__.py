"""What several rooms need, each once: files, devices, threads, memory, extras, progress, caches.

Private: nothing in here is part of the public interface.
"""
