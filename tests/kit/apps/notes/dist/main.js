// An app's page as described in docs/apps/write-an-app.md: it takes its token from its URL, reads rows through the
// bridge, and follows the change stream.
let token = location.pathname.split("/")[3].slice(1);
addEventListener("message", (event) => {
  if (event.source === parent && event.data?.type === "svc:app-token") token = event.data.token;
});

const list = document.querySelector("ul");
const status = document.querySelector("[role=status]");

async function callBridge(call) {
  const response = await fetch("/api/bridge/query", {
    method: "POST",
    headers: { authorization: `Bearer ${token}`, "content-type": "application/json" },
    body: JSON.stringify({ app: "notes", table: "notes", ...call }),
  });
  const body = await response.json();
  if (!response.ok) throw new Error(`${body.code}: ${body.detail}`);
  return body.data;
}

async function renderRows() {
  const rows = await callBridge({ action: "find" });
  list.replaceChildren(...rows.map(({ title }) => Object.assign(document.createElement("li"), { textContent: title })));
}

async function followChanges() {
  const response = await fetch("/api/bridge/changes?app=notes", { headers: { authorization: `Bearer ${token}` } });
  if (!response.ok) throw new Error(`changes: ${response.status}`);
  status.textContent = "live";
  for await (const events of response.body.pipeThrough(new TextDecoderStream())) {
    if (events.includes("data:")) await renderRows();
  }
}

const showError = (error) => { status.textContent = error.message; };
document.querySelector("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const form = event.target;
  callBridge({ action: "insert", data: { title: form.elements.title.value } }).then(() => form.reset(), showError);
});
renderRows().then(followChanges).catch(showError);
