//! Sums the ranks of a job, however it was launched:
//!
//! ```sh
//! cargo build --release -p burn-accelerate-collective --example all_reduce
//! mpirun -n 4 target/release/examples/all_reduce
//! srun -n 4 target/release/examples/all_reduce
//! accel-launch -n 4 target/release/examples/all_reduce
//! ```

use accelerator_collective::{GroupOptions, Launch, ProcessGroup, ReduceOp, Result};

fn main() -> Result<()> {
    let launch = Launch::from_env()?;
    let group = ProcessGroup::connect(&launch, &GroupOptions::new())?;
    let mut sum = [group.rank() as f64];
    group.all_reduce(&mut sum, ReduceOp::Sum)?;
    let source = launch.source().map_or("nobody", |source| source.launcher);
    println!(
        "{}, started by {source}, over {}: the ranks add up to {}",
        group.topology(),
        group.transport(),
        sum[0]
    );
    group.close()
}
