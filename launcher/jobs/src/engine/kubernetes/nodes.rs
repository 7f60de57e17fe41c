//! The nodes of a cluster, their allocated resources, and volumes.

use std::collections::BTreeMap;

use accelerator_host::cli::Result;
use k8s_openapi::api::core::v1::{Node, PersistentVolumeClaim, Pod};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::api::ListParams;
use kube::{Api, ResourceExt};

use super::cluster::{Cluster, seconds};
use crate::engine::Volume;
use crate::job::NodeUsage;
use crate::output::warn;

const GPU: &str = "nvidia.com/gpu";
const CONTROL_PLANE: [&str; 2] = [
    "node-role.kubernetes.io/control-plane",
    "node-role.kubernetes.io/master",
];

/// Lists the nodes and their allocations: only those of the namespace if this user may not see all.
///
/// # Errors
/// When the server refuses that too, or does not answer.
pub(super) async fn nodes(cluster: &Cluster) -> Result<Vec<NodeUsage>> {
    let running = ListParams::default().fields("status.phase!=Succeeded,status.phase!=Failed");
    let every_pod: Api<Pod> = Api::all(cluster.client.clone());
    let pods = match cluster.try_ask(|| every_pod.list(&running)).await {
        Ok(list) => list.items,
        Err(error) if error.code() == Some(403) => {
            let namespace = &cluster.namespace;
            warn(&format!(
                "this user may not list the pods of all namespaces, so only what namespace {namespace} has is shown as allocated"
            ));
            let own = cluster.api::<Pod>();
            cluster.ask("pods", || own.list(&running)).await?.items
        }
        Err(error) => return Err(error.into_error("pods", cluster)),
    };
    let allocated = allocated(&pods);
    let every_node: Api<Node> = Api::all(cluster.client.clone());
    let all = ListParams::default();
    match cluster.try_ask(|| every_node.list(&all)).await {
        Ok(list) => Ok(list
            .items
            .iter()
            .map(|node| usage(node, &allocated))
            .collect()),
        Err(error) if error.code() == Some(403) => {
            warn(
                "this user may not list nodes, so only those that its pods run on are shown, without their GPUs",
            );
            Ok(allocated
                .iter()
                .map(|(name, amounts)| unseen(name, *amounts))
                .collect())
        }
        Err(error) => Err(error.into_error("nodes", cluster)),
    }
}

/// Lists the PersistentVolumeClaims of the namespace.
pub(super) async fn volumes(cluster: &Cluster) -> Result<Vec<Volume>> {
    let api = cluster.api::<PersistentVolumeClaim>();
    let parameters = ListParams::default();
    let claims = cluster
        .ask("persistentvolumeclaims", || api.list(&parameters))
        .await?;
    let annotation = |claim: &PersistentVolumeClaim, key: &str| {
        claim.annotations().get(key).cloned().unwrap_or_default()
    };
    let volume = |claim: &PersistentVolumeClaim| Volume {
        name: claim.name_any(),
        access_mode: claim
            .spec
            .as_ref()
            .and_then(|spec| spec.access_modes.as_ref())
            .map(|modes| modes.join(","))
            .unwrap_or_default(),
        description: annotation(claim, "description"),
        owner: annotation(claim, "owner"),
        created: claim.metadata.creation_timestamp.as_ref().map(seconds),
    };
    Ok(claims.items.iter().map(volume).collect())
}

/// GPUs and cores.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Amounts {
    gpus: usize,
    cpus: f64,
}

/// Adds up the requests of the pods on each node.
fn allocated(pods: &[Pod]) -> BTreeMap<String, Amounts> {
    let mut nodes: BTreeMap<String, Amounts> = BTreeMap::new();
    for pod in pods {
        let Some((spec, node)) = pod
            .spec
            .as_ref()
            .and_then(|spec| Some((spec, spec.node_name.as_ref()?)))
        else {
            continue;
        };
        let sum = nodes.entry(node.clone()).or_default();
        for container in &spec.containers {
            let requests = container
                .resources
                .as_ref()
                .and_then(|resources| resources.requests.as_ref());
            let amounts = amounts(requests);
            sum.gpus += amounts.gpus;
            sum.cpus += amounts.cpus;
        }
    }
    nodes
}

fn amounts(quantities: Option<&BTreeMap<String, Quantity>>) -> Amounts {
    let text = |name: &str| quantities?.get(name).map(|quantity| quantity.0.as_str());
    Amounts {
        gpus: text(GPU).and_then(|text| text.parse().ok()).unwrap_or(0),
        cpus: text("cpu").and_then(cpus).unwrap_or(0.0),
    }
}

/// Parses `2`, `1.5`, `500m`.
fn cpus(text: &str) -> Option<f64> {
    match text.strip_suffix('m') {
        Some(thousandths) => Some(thousandths.parse::<f64>().ok()? / 1000.0),
        None => text.parse().ok(),
    }
}

fn usage(node: &Node, allocated: &BTreeMap<String, Amounts>) -> NodeUsage {
    let name = node.name_any();
    let status = node.status.as_ref();
    let has = amounts(status.and_then(|status| status.allocatable.as_ref()));
    let used = allocated.get(&name).copied().unwrap_or_default();
    let addresses = status
        .and_then(|status| status.addresses.as_deref())
        .unwrap_or_default();
    let address = addresses
        .iter()
        .find(|address| address.type_ == "InternalIP")
        .or(addresses.first());
    let conditions = status
        .and_then(|status| status.conditions.as_deref())
        .unwrap_or_default();
    let is_ready = conditions
        .iter()
        .any(|condition| condition.type_ == "Ready" && condition.status == "True");
    let is_closed = node
        .spec
        .as_ref()
        .is_some_and(|spec| spec.unschedulable == Some(true));
    let is_master = CONTROL_PLANE
        .iter()
        .any(|label| node.labels().contains_key(*label));
    NodeUsage {
        name,
        address: address
            .map(|address| address.address.clone())
            .unwrap_or_default(),
        role: if is_master { "master" } else { "<none>" }.to_owned(),
        status: match (is_ready, is_closed) {
            (true, false) => "ready",
            (true, true) => "ready,SchedulingDisabled",
            (false, _) => "NotReady",
        }
        .to_owned(),
        gpus: has.gpus,
        gpus_allocated: used.gpus,
        cpus: has.cpus,
        cpus_allocated: used.cpus,
    }
}

fn unseen(name: &str, used: Amounts) -> NodeUsage {
    NodeUsage {
        name: name.to_owned(),
        address: "N/A".to_owned(),
        role: "<none>".to_owned(),
        status: "unknown".to_owned(),
        gpus: used.gpus,
        gpus_allocated: used.gpus,
        cpus: used.cpus,
        cpus_allocated: used.cpus,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_pods_ask_for_is_allocated_where_they_are() {
        let pod = |node: Option<&str>| -> Pod {
            serde_json::from_value(json!({"spec": {"nodeName": node, "containers": [
                {"name": "a", "resources": {"requests": {GPU: "2", "cpu": "500m"}}}, {"name": "b"}]}}))
            .unwrap()
        };
        let sums = allocated(&[pod(Some("n1")), pod(Some("n1")), pod(None)]);
        assert_eq!(
            sums.into_iter().collect::<Vec<_>>(),
            [("n1".to_owned(), Amounts { gpus: 4, cpus: 1.0 })]
        );
    }

    #[test]
    fn nodes_say_what_they_are() {
        let node: Node = serde_json::from_value(json!({
            "metadata": {"name": "n1", "labels": {"node-role.kubernetes.io/control-plane": ""}},
            "spec": {"unschedulable": true},
            "status": {"allocatable": {GPU: "8", "cpu": "64"},
                "addresses": [{"type": "Hostname", "address": "n1"}, {"type": "InternalIP", "address": "10.0.0.1"}],
                "conditions": [{"type": "Ready", "status": "True"}]},
        }))
        .unwrap();
        let usage = usage(&node, &BTreeMap::new());
        assert_eq!(
            (usage.gpus, usage.address.as_str(), usage.role.as_str()),
            (8, "10.0.0.1", "master")
        );
        assert_eq!(usage.status, "ready,SchedulingDisabled");
    }
}
