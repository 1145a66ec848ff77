//! Runs this program from a sealed copy in memory.

/// The name of our processes (`comm`).
const PROCESS_NAME: &std::ffi::CStr = c"coracle";

/// Re-executes this program from a sealed copy (memfd), as the hub and sandboxes do then too, because containers could modify the
/// executable of a process that enters them (CVE-2019-5736). If that fails, the container runtime still refuses to execute it.
pub fn run_from_sealed_copy() {
    if linux::sealed::is_sealed().is_ok_and(|sealed| sealed) {
        // After execution from a memfd, `comm` is a descriptor's number.
        let _ = rustix::thread::set_name(PROCESS_NAME);
        return;
    }
    let error = linux::sealed::reexec_from_copy(&PROCESS_NAME.to_string_lossy());
    tracing::warn!(%error, "cannot run from a sealed copy of this program");
}
