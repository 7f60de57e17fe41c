//! A port of a job's pod as a port of this machine.

use std::io::Write;
use std::net::Ipv4Addr;

use k8s_openapi::api::core::v1::Pod;
use kube::{Api, ResourceExt};
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};

use super::cluster::Cluster;
use super::objects::{AGENT, PART_LABEL, TENSORBOARD, TENSORBOARD_PORT, selector};
use super::pods::{self, NodePods};
use crate::engine::PortPair;
use crate::error::{Error, Result};
use crate::output::warn;
use crate::spec::JobSpec;

/// Forwards connections to `ports.local` until this process is ended. TensorBoard's port is that of its pod, any other that
/// of node 0.
///
/// # Errors
/// When no such pod runs, the port is taken here, or the server refuses it.
pub(super) async fn forward(
    cluster: &Cluster,
    job: &JobSpec,
    ports: PortPair,
    output: &mut dyn Write,
) -> Result<()> {
    let part = if i32::from(ports.remote) == TENSORBOARD_PORT {
        TENSORBOARD
    } else {
        AGENT
    };
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, ports.local))
        .await
        .map_err(|error| {
            Error::usage(format!(
                "port {} of this machine cannot be listened at; give another, LOCAL:REMOTE",
                ports.local
            ))
            .with_source(error)
        })?;
    let local = listener
        .local_addr()
        .map_or(ports.local, |address| address.port());
    let first = target(cluster, job, part).await?;
    let said = writeln!(
        output,
        "http://localhost:{local} is port {} of pod {first}; Ctrl-C ends it",
        ports.remote
    );
    said.and_then(|()| output.flush())
        .map_err(|error| Error::system("output cannot be written").with_source(error))?;
    loop {
        let (connection, _) = listener
            .accept()
            .await
            .map_err(|error| Error::system("no connection can be taken").with_source(error))?;
        // Another pod may have come in its place.
        let pod = target(cluster, job, part).await?;
        let api = cluster.api::<Pod>();
        tokio::spawn(async move {
            if let Err(error) = carry(&api, &pod, ports.remote, connection).await {
                warn(&format!("a connection to pod {pod} has ended: {error}"));
            }
        });
    }
}

/// The pod of that part of the job that runs.
async fn target(cluster: &Cluster, job: &JobSpec, part: &str) -> Result<String> {
    let selector = format!("{},{PART_LABEL}={part}", selector(job));
    let found = cluster
        .labelled("pods", &cluster.api::<Pod>(), &selector)
        .await?;
    let runs = |pod: &&Pod| pods::runs(pod);
    let pod = match part {
        AGENT => NodePods::of(found, pods::Warnings::default())
            .of_node(0)
            .iter()
            .rev()
            .find(runs)
            .cloned(),
        _ => found.into_iter().find(pods::runs),
    };
    pod.map(|pod| pod.name_any()).ok_or_else(|| {
        Error::refused(format!(
            "no pod of job {0} runs that has this port; `accel-launch jobs get {0}` says more",
            job.name
        ))
    })
}

async fn carry(
    api: &Api<Pod>,
    pod: &str,
    port: u16,
    mut connection: TcpStream,
) -> std::result::Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let mut forwarder = api.portforward(pod, &[port]).await?;
    let mut stream = forwarder
        .take_stream(port)
        .ok_or("the server gives no stream")?;
    copy_bidirectional(&mut connection, &mut stream).await?;
    drop(stream);
    forwarder.join().await?;
    Ok(())
}
