//! Keyrings, in which the kernel holds keys of users and sessions.

use std::io;
use std::ptr;

/// KEYCTL_JOIN_SESSION_KEYRING of linux/keyctl.h.
const JOIN_SESSION: libc::c_int = 1;

/// Gives this process an empty session keyring of its own, which what it starts inherits. The keys of the session before are out
/// of its reach, unless their permissions open them to the user; they themselves stay as they are.
///
/// It fails on a kernel without keys, and where the user has as many keyrings as they may (200, usually).
pub fn join_new_session() -> io::Result<()> {
    // SAFETY: the kernel takes the null pointer for "a keyring without a name", and is given no other memory.
    let joined = unsafe { libc::syscall(libc::SYS_keyctl, JOIN_SESSION, ptr::null::<u8>()) };
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
        // SAFETY: the call is given numbers only.
        unsafe { libc::syscall(libc::SYS_keyctl, GET_KEYRING_ID, SESSION, 1) }
    }

    fn add(payload: &[u8]) -> libc::c_long {
        let (kind, name) = (c"user".as_ptr(), c"coracle-test".as_ptr());
        // SAFETY: the kernel reads two strings that end in zero, and the payload, whose length it is told.
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
        let mut room = [0_u8; 16];
        // SAFETY: the kernel writes into `room`, whose length it is told.
        unsafe { libc::syscall(libc::SYS_keyctl, READ, key, room.as_mut_ptr(), room.len()) >= 0 }
    }

    #[test]
    fn keys_of_the_session_before_are_out_of_reach() {
        assert!(in_a_child(|| {
            join_new_session().unwrap();
            let before = session();
            let key = add(b"secret");
            let was_readable = is_readable(key);
            join_new_session().unwrap();
            key > 0 && was_readable && session() != before && !is_readable(key)
        }));
    }
}
