//! The longest pause before a connection sends again what the network has lost.

#![cfg_attr(
    target_os = "linux",
    expect(unsafe_code, reason = "an option of the system that no crate knows")
)]

use std::net::TcpStream;

/// Lets a connection send again within a second what the network has lost. The system's pauses double without that: a
/// link that is down for 3 s may stay silent for 6 s, and a peer be taken for lost that no longer is.
///
/// Linux has this since 6.15; elsewhere nothing changes.
pub fn limit_backoff(stream: &TcpStream) {
    #[cfg(target_os = "linux")]
    {
        use std::ffi::{c_int, c_void};
        use std::os::fd::AsRawFd;

        unsafe extern "C" {
            fn setsockopt(
                socket: c_int,
                level: c_int,
                option: c_int,
                value: *const c_void,
                length: u32,
            ) -> c_int;
        }

        /// `linux/in.h` and `linux/tcp.h`, the same on every architecture.
        const IPPROTO_TCP: c_int = 6;
        const TCP_RTO_MAX_MS: c_int = 44;

        let milliseconds: c_int = 1000;
        // SAFETY: the descriptor is open as long as `stream` is borrowed, and the option is one `int`, which is read
        // from a value that lives. A kernel that does not know it returns an error and changes nothing.
        unsafe {
            setsockopt(
                stream.as_raw_fd(),
                IPPROTO_TCP,
                TCP_RTO_MAX_MS,
                (&raw const milliseconds).cast(),
                size_of::<c_int>() as u32,
            );
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = stream;
}
