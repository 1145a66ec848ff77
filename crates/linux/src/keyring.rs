//! Kernel keyrings, which hold keys of users and sessions.

use std::io;
use std::ptr;

/// From linux/keyctl.h.
const KEYCTL_JOIN_SESSION_KEYRING: libc::c_int = 1;

/// Gives this process a new, empty session keyring, which its children inherit. The process loses access to the keys of the
/// previous session, unless their permissions admit the user. Those keys do not change.
///
/// Fails on a kernel without keyrings, and if the user's quota of keyrings (usually 200) is used up.
pub fn join_new_session_keyring() -> io::Result<()> {
    // SAFETY: a null pointer means a keyring without a name; the kernel gets no other memory.
    let joined = unsafe {
        libc::syscall(
            libc::SYS_keyctl,
            KEYCTL_JOIN_SESSION_KEYRING,
            ptr::null::<u8>(),
        )
    };
    match joined {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::in_a_child;

    const GET_KEYRING_ID: libc::c_int = 0;
    const READ: libc::c_int = 11;
    const SESSION: libc::c_int = -3;

    fn session() -> libc::c_long {
        // SAFETY: the call takes integers only.
        unsafe { libc::syscall(libc::SYS_keyctl, GET_KEYRING_ID, SESSION, 1) }
    }

    fn add(payload: &[u8]) -> libc::c_long {
        let (kind, name) = (c"user".as_ptr(), c"coracle-test".as_ptr());
        // SAFETY: the kernel reads two C strings, and the payload with the given length.
        unsafe {
            libc::syscall(
                libc::SYS_add_key,
                kind,
                name,
                payload.as_ptr(),
                payload.len(),
                SESSION,
            )
        }
    }

    fn is_readable(key: libc::c_long) -> bool {
        let mut buffer = [0_u8; 16];
        // SAFETY: the kernel writes at most `buffer.len()` bytes into `buffer`.
        unsafe {
            libc::syscall(
                libc::SYS_keyctl,
                READ,
                key,
                buffer.as_mut_ptr(),
                buffer.len(),
            ) >= 0
        }
    }

    #[test]
    fn keys_of_previous_session_are_not_readable() {
        assert!(in_a_child(|| {
            join_new_session_keyring().unwrap();
            let before = session();
            let key = add(b"secret");
            let was_readable = is_readable(key);
            join_new_session_keyring().unwrap();
            key > 0 && was_readable && session() != before && !is_readable(key)
        }));
    }
}
