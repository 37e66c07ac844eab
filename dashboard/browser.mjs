// Prints the path of the browser, which it unpacks at the first call.
import chromium from "@sparticuz/chromium";

console.log(await chromium.executablePath());
