//! Tests for the API's rules over plain HTTP, without the product's adapter.

use std::time::Duration;

use anyhow::{Result, ensure};
use reqwest::Method;
use serde_json::{Value, json};

use super::{Fault, FaultRule, Power, RateLimit, Simulator, SimulatorOptions};

pub(super) struct Api {
    client: reqwest::Client,
    base: String,
    token: String,
}

pub(super) struct ApiResponse {
    pub(super) status: u16,
    pub(super) body: Value,
    headers: reqwest::header::HeaderMap,
}

impl Api {
    pub(super) fn for_simulator(simulator: &Simulator) -> Self {
        // The crypto provider is installed once per process; later attempts fail harmlessly.
        let _ = rustls::crypto::ring::default_provider().install_default();
        Self::new(simulator.base_url(), simulator.token().to_owned())
    }

    pub(super) fn new(base: String, token: String) -> Self {
        Self { client: reqwest::Client::new(), base, token }
    }

    pub(super) async fn call(&self, method: Method, path: &str, body: Option<Value>) -> Result<ApiResponse> {
        let mut request =
            self.client.request(method, format!("{}{path}", self.base)).bearer_auth(&self.token);
        if let Some(body) = body {
            request = request.json(&body);
        }
        let response = request.send().await?;
        let (status, headers) = (response.status().as_u16(), response.headers().clone());
        Ok(ApiResponse { status, headers, body: response.json().await? })
    }

    pub(super) async fn get(&self, path: &str) -> Result<ApiResponse> {
        self.call(Method::GET, path, None).await
    }

    pub(super) async fn post(&self, path: &str, body: Value) -> Result<ApiResponse> {
        self.call(Method::POST, path, Some(body)).await
    }

    /// Creates a server; returns its id.
    pub(super) async fn create(&self, name: &str, user_data: &str) -> Result<i64> {
        let mut request = server_request(name);
        request["user_data"] = user_data.into();
        let response = self.post("/servers", request).await?;
        ensure!(response.status == 201, "{}", response.body);
        Ok(response.body["server"]["id"].as_i64().unwrap_or_default())
    }

    /// Waits until no action is running on the server.
    pub(super) async fn wait_until_unlocked(&self, id: i64) -> Result<()> {
        while self.get(&format!("/servers/{id}")).await?.body["server"]["locked"] == true {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        Ok(())
    }

    pub(super) async fn delete(&self, id: i64) -> Result<ApiResponse> {
        self.call(Method::DELETE, &format!("/servers/{id}"), None).await
    }

    /// Starts an action, waits for its end, and returns its status.
    pub(super) async fn run_action(&self, id: i64, action: &str, body: Value) -> Result<String> {
        let response = self.post(&format!("/servers/{id}/actions/{action}"), body).await?;
        ensure!(response.status == 201, "{}", response.body);
        let path = format!("/actions/{}", response.body["action"]["id"]);
        loop {
            let action = self.get(&path).await?.body["action"].take();
            if action["status"] != "running" {
                ensure!(!action["finished"].is_null() && action["progress"] == 100, "{action}");
                return Ok(action["status"].as_str().unwrap_or_default().to_owned());
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

fn server_request(name: &str) -> Value {
    json!({"name": name, "server_type": "cpx22", "image": "debian-12", "location": "nbg1"})
}

fn status_and_code(response: &ApiResponse) -> (u16, &str) {
    (response.status, response.body["error"]["code"].as_str().unwrap_or("none"))
}

async fn start() -> Result<(Simulator, Api)> {
    let simulator = Simulator::start(SimulatorOptions::record()).await?;
    let api = Api::for_simulator(&simulator);
    Ok((simulator, api))
}

#[tokio::test]
async fn wrong_token_is_rejected_without_effect() -> Result<()> {
    let (simulator, mut api) = start().await?;
    api.token = "wrong".to_owned();
    simulator.add_fault(FaultRule::once("POST", "/servers", Fault::LostRequest));
    let response = api.post("/servers", server_request("a")).await?;
    assert_eq!(status_and_code(&response), (401, "unauthorized"));
    assert!(simulator.creations().is_empty());
    assert_eq!(simulator.pending_faults().len(), 1);
    Ok(())
}

#[tokio::test]
async fn create_server_error_names_invalid_field() -> Result<()> {
    let (simulator, api) = start().await?;
    for (field, value) in [
        ("name", json!("not a host name")),
        ("server_type", json!("cx1")),
        ("image", json!("debian-1")),
        ("location", json!("moon")),
        ("labels", json!({"a": "not a label"})),
        ("user_data", json!("x".repeat(32 * 1024 + 1))),
    ] {
        let mut invalid = server_request("a");
        invalid[field] = value;
        let response = api.post("/servers", invalid).await?;
        assert_eq!(status_and_code(&response), (422, "invalid_input"), "{field}");
        assert_eq!(response.body["error"]["details"]["fields"][0]["name"], field);
    }
    assert_eq!(api.post("/servers", json!([])).await?.status, 400);
    assert!(simulator.servers().is_empty());
    Ok(())
}

#[tokio::test]
async fn names_are_unique_among_existing_servers() -> Result<()> {
    let (simulator, api) = start().await?;
    let first = api.create("a", "").await?;
    assert_eq!(status_and_code(&api.post("/servers", server_request("a")).await?), (409, "uniqueness_error"));
    simulator.wait_for_power("a", Power::Running).await?;
    api.wait_until_unlocked(first).await?;
    assert_eq!(api.delete(first).await?.status, 200);
    let second = api.create("a", "").await?;
    assert_ne!(first, second);
    let ended: Vec<bool> = simulator.creations().iter().map(|creation| creation.ended.is_some()).collect();
    assert_eq!(ended, [true, false]);
    Ok(())
}

#[tokio::test]
async fn server_is_locked_while_an_action_is_running() -> Result<()> {
    let options =
        SimulatorOptions { action_duration: Duration::from_millis(300), ..SimulatorOptions::record() };
    let simulator = Simulator::start(options).await?;
    let api = Api::for_simulator(&simulator);
    let id = api.create("a", "").await?;
    assert_eq!(simulator.server_by_name("a").map(|server| server.status), Some(Power::Initializing));
    assert_eq!(api.get(&format!("/servers/{id}")).await?.body["server"]["locked"], true);
    let power_off = format!("/servers/{id}/actions/poweroff");
    assert_eq!(status_and_code(&api.post(&power_off, json!({})).await?), (423, "locked"));
    assert_eq!(status_and_code(&api.delete(id).await?), (423, "locked"));
    simulator.wait_for_power("a", Power::Running).await?;
    Ok(())
}

#[tokio::test]
async fn change_type_enforces_power_and_disk_rules() -> Result<()> {
    let (simulator, api) = start().await?;
    let id = api.create("a", "").await?;
    simulator.wait_for_power("a", Power::Running).await?;
    let change = format!("/servers/{id}/actions/change_type");
    let to = |name: &str, grow: bool| json!({"server_type": name, "upgrade_disk": grow});

    api.wait_until_unlocked(id).await?;
    assert_eq!(status_and_code(&api.post(&change, to("cpx32", false)).await?), (422, "server_not_stopped"));
    assert_eq!(api.run_action(id, "poweroff", json!({})).await?, "success");
    assert_eq!(status_and_code(&api.post(&change, to("cpx12", false)).await?), (422, "invalid_server_type"));
    assert_eq!(status_and_code(&api.post(&change, to("cpx22", false)).await?), (422, "invalid_server_type"));

    assert_eq!(api.run_action(id, "change_type", to("cpx32", false)).await?, "success");
    assert_eq!(simulator.server_by_name("a").map(|s| (s.server_type, s.disk_gb)), Some(("cpx32".into(), 80)));
    assert_eq!(api.run_action(id, "change_type", to("cpx52", true)).await?, "success");
    assert_eq!(simulator.server_by_name("a").map(|s| s.disk_gb), Some(480));
    assert_eq!(status_and_code(&api.post(&change, to("cpx32", false)).await?), (422, "invalid_server_type"));
    Ok(())
}

#[tokio::test]
async fn guest_can_ignore_shutdown() -> Result<()> {
    let (simulator, api) = start().await?;
    let id = api.create("a", "").await?;
    simulator.wait_for_power("a", Power::Running).await?;
    api.wait_until_unlocked(id).await?;

    simulator.set_obeys_shutdown("a", false)?;
    assert_eq!(api.run_action(id, "shutdown", json!({})).await?, "success");
    assert_eq!(simulator.server_by_name("a").map(|server| server.status), Some(Power::Running));
    simulator.set_obeys_shutdown("a", true)?;
    assert_eq!(api.run_action(id, "shutdown", json!({})).await?, "success");
    simulator.wait_for_power("a", Power::Off).await?;
    assert_eq!(api.run_action(id, "shutdown", json!({})).await?, "success", "already off");
    assert_eq!(api.run_action(id, "poweron", json!({})).await?, "success");
    simulator.wait_for_power("a", Power::Running).await?;
    Ok(())
}

#[tokio::test]
async fn list_servers_is_paginated() -> Result<()> {
    let (_simulator, api) = start().await?;
    for nth in 0..7 {
        api.create(&format!("a{nth}"), "").await?;
    }
    let first = api.get("/servers?per_page=3").await?.body;
    let expected = json!({"page": 1, "per_page": 3, "previous_page": null, "next_page": 2, "last_page": 3, "total_entries": 7});
    assert_eq!(first["meta"]["pagination"], expected);
    let last = api.get("/servers?per_page=3&page=3").await?.body;
    assert_eq!(last["servers"].as_array().map(Vec::len), Some(1));
    assert_eq!(last["meta"]["pagination"]["next_page"], Value::Null);
    assert_eq!(
        status_and_code(&api.get("/servers?label_selector=a%20in%20(b").await?),
        (422, "invalid_input")
    );
    Ok(())
}

#[tokio::test]
async fn rate_limit_is_reported_and_enforced() -> Result<()> {
    let rate_limit = RateLimit { limit: 2, per_second: 0.01 };
    let simulator = Simulator::start(SimulatorOptions { rate_limit, ..SimulatorOptions::record() }).await?;
    let api = Api::for_simulator(&simulator);
    let response = api.get("/servers").await?;
    assert_eq!(
        (&response.headers["ratelimit-limit"], &response.headers["ratelimit-remaining"]),
        (&"2".parse()?, &"1".parse()?)
    );
    assert!(
        response.headers["ratelimit-reset"].to_str()?.parse::<i64>()? > jiff::Timestamp::now().as_second()
    );
    api.get("/servers").await?;
    assert_eq!(status_and_code(&api.get("/servers").await?), (429, "rate_limit_exceeded"));
    Ok(())
}

#[tokio::test]
async fn lost_reply_takes_effect_and_lost_request_does_not() -> Result<()> {
    let (simulator, api) = start().await?;
    for (name, fault, created) in [("a", Fault::LostReplyAfterCommit, true), ("b", Fault::LostRequest, false)]
    {
        simulator.add_fault(FaultRule::once("POST", "/servers", fault));
        assert!(api.create(name, "").await.is_err(), "the connection was not cut");
        assert_eq!(simulator.server_by_name(name).is_some(), created, "{name}");
    }
    assert!(simulator.pending_faults().is_empty());
    assert_eq!(simulator.calls().iter().filter(|call| call.status.is_none()).count(), 2);
    Ok(())
}

#[tokio::test]
async fn faults_and_control_work_over_http() -> Result<()> {
    let (simulator, api) = start().await?;
    let control = Api::new(simulator.control_url(), String::new());
    let rule = json!({"method": "GET", "pathContains": "/servers", "times": 1,
        "fault": {"kind": "status", "status": 503, "code": "unavailable"}});
    assert_eq!(control.post("/faults", rule).await?.status, 200);
    assert_eq!(status_and_code(&api.get("/servers").await?), (503, "unavailable"));

    api.create("a", "").await?;
    assert_eq!(control.get("/servers").await?.body[0]["name"], "a");
    assert_eq!(control.post("/servers/a/lose", json!({})).await?.status, 200);
    assert_eq!(control.get("/servers").await?.body, json!([]));
    assert!(control.get("/creations").await?.body[0]["ended"].is_string());
    assert_eq!(control.get("/calls").await?.body[0]["status"], 503);
    let rejected = control.post("/servers/a/kill", json!({})).await?;
    assert_eq!(rejected.status, 409);
    assert_eq!(control.get("/hosts").await?.status, 409, "records have no hosts");
    Ok(())
}
