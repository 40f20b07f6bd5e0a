//! The loopback interface of a restored network namespace.
//!
//! `runc restore` makes a new network namespace and leaves its `lo` down, while `runc create` brings it up.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::error::TaskError;

/// Brings `lo` up in the network namespace of process `pid`.
///
/// # Errors
/// The namespace cannot be entered, or the kernel refuses.
pub fn bring_up_loopback(pid: i32) -> Result<(), TaskError> {
    let act = format!("bring up lo in the network namespace of process {pid}");
    // A thread of its own: it ends in the other namespace, and no task may run there.
    let result = std::thread::scope(|scope| {
        let entering = scope.spawn(|| {
            let namespace = File::open(format!("/proc/{pid}/ns/net"))?;
            move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?;
            set_loopback_up()
        });
        entering.join().unwrap_or_else(|_| Err(io::Error::other("the thread panicked")))
    });
    result.map_err(TaskError::io(act))
}

fn set_loopback_up() -> io::Result<()> {
    let socket = socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    // SAFETY: a zeroed `ifreq` is valid: it consists of integers and arrays of them.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, &from) in request.ifr_name.iter_mut().zip(b"lo") {
        *to = from.cast_signed();
    }
    // SAFETY: the request is an `ifreq` with a terminated name, which the kernel reads and fills.
    if unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFFLAGS, &raw mut request) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: SIOCGIFFLAGS has just filled this member of the union.
    let flags = unsafe { request.ifr_ifru.ifru_flags };
    let up = libc::c_short::try_from(libc::IFF_UP | libc::IFF_RUNNING).unwrap_or_default();
    request.ifr_ifru.ifru_flags = flags | up;
    // SAFETY: as above; the kernel reads the name and the flags.
    if unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &raw mut request) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
