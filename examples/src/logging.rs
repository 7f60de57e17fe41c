use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;

/// Shows warnings on standard error (whom a rank waits for, say), or what `RUST_LOG` asks for.
pub fn init_logging() {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("warn"));
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr);
    // Fails where the program has one already, which is as good.
    let _ = subscriber.try_init();
}
