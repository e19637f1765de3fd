// A page that is opened from a disk may start no worker. There, that of the search runs in a frame; it knows so by the name.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.frame = frame;
      frame.contentDocument.open();
      frame.contentDocument.write(`<body><script>
        postMessage = (data) => parent.postMessage(data, "*");
        importScripts = (...urls) => urls.reduce((last, src) => last.then(() => new Promise((done) => {
          document.body.append(Object.assign(document.createElement("script"), { src, onload: done }));
        })), Promise.resolve());
      <\/script><script src="${url}"><\/script></body>`);
      frame.contentDocument.close();
      this.loaded = new Promise((done) => (frame.contentWindow.onload = done));
      window.addEventListener("message", ({ source, data }) => {
        if (source !== frame.contentWindow) return;
        const told = new MessageEvent("message", { data });
        this.dispatchEvent(told);
        this.onmessage?.(told);
      });
    }

    postMessage(data) {
      this.loaded.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
