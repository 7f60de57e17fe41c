use accelerator::logging::{self, LogRanks};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::prelude::*;

/// Shows warnings on standard error (whom a rank waits for, say), or what `RUST_LOG` asks for.
pub fn init_logging() {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("warn"));
    // An environment that is wrong is an error of `Accelerator::new`, which says more.
    if let Ok(layer) = logging::layer(LogRanks::Every) {
        // Fails where the program has one already, which is as good.
        let _ = tracing_subscriber::registry()
            .with(filter)
            .with(layer)
            .try_init();
    }
}
