//! Locking without poison handling.

use std::sync::{Mutex, MutexGuard};

/// Locks a mutex. A release build never finds it poisoned: there a panic aborts the process.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("another thread panicked")
}
