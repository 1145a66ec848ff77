//! Layers of all kinds, unpacked on this machine's file system.
